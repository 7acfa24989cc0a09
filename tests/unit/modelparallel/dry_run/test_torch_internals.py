"""The places in torch that the dry run reaches into are still there, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run import _torch_internals as dry_run

pytestmark = pytest.mark.newest


def test_hooks_on_saved_tensors_step_aside_for_transforms_and_come_back() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    x = torch.ones(3, requires_grad=True)
    with dry_run.seeing_what_is_saved(pack):
        found = torch.func.grad(lambda each: each.square().sum())(torch.ones(3))
        assert not seen
        x.square()
        assert len(seen) == 1
    assert found.tolist() == [2.0] * 3
    x.square()
    assert len(seen) == 1


def test_nodes_of_the_graph_tell_when_they_were_made() -> None:
    weight = torch.ones(2, requires_grad=True)
    before = dry_run.number_of_next_node()
    out = weight * 2
    assert out.grad_fn is not None
    number = dry_run.made_by(out.grad_fn)
    assert number is not None and before <= number < dry_run.number_of_next_node()
    accumulates = out.grad_fn.next_functions[0][0]
    assert accumulates is not None and dry_run.made_by(accumulates) is None


@pytest.mark.parametrize(
    "hook",
    [
        lambda model: model[0].weight.register_hook(lambda gradient: None),
        lambda model: model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda model: model[0].register_full_backward_hook(lambda *_: None),
        lambda model: model.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_hooks_that_a_backward_would_call_are_found(hook: Callable[[nn.Sequential], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not dry_run.has_backward_hooks(model)
    handle = hook(model)
    assert dry_run.has_backward_hooks(model)
    handle.remove()
    assert not dry_run.has_backward_hooks(model)
