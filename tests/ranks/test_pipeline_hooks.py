"""Forward hooks deep inside modules that live on one rank, and what they carry out of them."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, equal_gradients
from tests.support.partitioned import restart

WIDTH, MICROBATCHES, LAYERS = 8, 4, 4
kept = threading.local()  # microbatches have threads of their own


class Block(nn.Module):
    """A residual block with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x) * torch.sigmoid(self.gate(x))
        return out


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def keep_energy(module: nn.Module, args: Any, out: Tensor) -> None:
    kept.tensors.append(out.square().mean())


def with_penalty(model: Any, x: Tensor) -> Tensor:
    kept.tensors = []
    loss: Tensor = model(x).square().mean()
    return loss + sum(kept.tensors)


def data() -> Tensor:
    return torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1))


def train_on_what_hooks_keep(stages: int) -> list[str]:
    """The loss has a term of every gate; names of the parameters whose gradients have been compared."""
    plain, module = build(), build()
    for each in (plain, module):
        for block in each:
            block.gate.register_forward_hook(keep_energy)
    for part in data().chunk(MICROBATCHES):
        torch.autograd.backward(with_penalty(plain, part) / MICROBATCHES)
    restart(partitions=stages, microbatches=MICROBATCHES)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss = with_penalty(model, x)
        model.backward(loss)
        return loss, kept.tensors

    compared: list[str] = []
    for _ in range(2):
        module.zero_grad()
        _, energies = step(data())
        assert len(energies) == LAYERS and all(each.outputs[0] > 0 for each in energies)
        compared += equal_gradients(module, plain)
    smp.shutdown()
    return compared


@pytest.mark.parametrize("stages", [2, 4])
def test_a_loss_on_features_that_inner_hooks_keep_trains_like_plain_pytorch(pool: Pools, stages: int) -> None:
    found = pool(stages).run(train_on_what_hooks_keep, stages)
    names = [name for name, _ in build().named_parameters()]
    assert sorted(name for each in found for name in each) == sorted(2 * names)


def watch_quietly() -> tuple[int, list[str], list[str], list[str]]:
    """Calls that a hook saw here, modules that were opened, warnings before and after a further hook."""
    restart(partitions=2, microbatches=MICROBATCHES)
    module = build()
    calls: list[int] = []
    for block in module:
        block.gate.register_forward_hook(lambda *_: calls.append(1))
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model(x).sum())
    messages: list[list[str]] = []
    step(data())
    calls.clear()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(data())
            step(data())
        messages.append([str(each.message) for each in caught])
        module[0].inner[0].register_forward_hook(lambda *_: None)
    opened = list(model.plan.opened)
    smp.shutdown()
    return len(calls), opened, messages[0], messages[1]


def test_hooks_whose_tensors_nobody_needs_change_nothing(pool: Pools) -> None:
    found = pool(2).run(watch_quietly)
    assert sum(calls for calls, _, _, _ in found) == 4 * LAYERS * MICROBATCHES
    for _, opened, before, after in found:
        assert not opened
        assert not before
        assert len(after) == 1 and "'0.inner.0' has got a forward hook" in after[0]
