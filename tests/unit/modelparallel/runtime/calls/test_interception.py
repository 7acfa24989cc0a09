"""Forwards of modules are intercepted, and can still be called as they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp


class Extended(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super()._orig_forward(x) + 1  # type: ignore[misc]
        return out


class Twice(Extended):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * super()._orig_forward(x)  # type: ignore[misc]
        return out


def test_a_module_can_call_the_original_forward_of_the_class_it_extends(initialised: None) -> None:
    plain, module = nn.Linear(2, 2), nn.Sequential(Twice(2, 2))
    module[0].load_state_dict(plain.state_dict())
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    x = torch.ones(1, 2)
    assert torch.equal(step(x).concat(), 2 * (plain(x).detach() + 1))
