"""Forward hooks deep inside modules that live on one rank, and what they carry out of them."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from tests.support.equality import Pools, equal_gradients
from tests.support.partitioned import restart
from tests.support.ranks import run_once

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


def keep_given_energy(module: nn.Module, args: Any) -> None:
    kept.tensors.append(args[0].square().mean())


def hook_after(block: Block) -> None:
    block.gate.register_forward_hook(keep_energy)


def hook_before(block: Block) -> None:
    block.inner[1].register_forward_pre_hook(keep_given_energy)


HOOKED = {"after": hook_after, "before": hook_before}


def placed(module: nn.Sequential, stages: int, by_hand: bool) -> nn.Sequential:
    restart(partitions=stages, microbatches=MICROBATCHES, auto_partition=not by_hand, default_partition=0)
    for number, block in enumerate(module if by_hand else ()):
        smp.set_partition(block, number * stages // LAYERS)
    return module


def train_on_what_hooks_keep(stages: int, by_hand: bool, hooked: str) -> list[str]:
    """The loss has a term of every gate; names of the parameters whose gradients have been compared."""
    plain, module = build(), build()
    for one in (plain, module):
        for block in one:
            HOOKED[hooked](block)
    for part in data().chunk(MICROBATCHES):
        torch.autograd.backward(with_penalty(plain, part) / MICROBATCHES)
    model = smp.DistributedModel(placed(module, stages, by_hand))

    @smp.step
    def step(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss = with_penalty(model, x)
        model.backward(loss)
        return loss, kept.tensors

    compared: list[str] = []
    for _ in range(2):
        module.zero_grad()
        _, energies = step(data())
        assert len(energies) == LAYERS and all(energy.outputs[0] > 0 for energy in energies)
        compared += equal_gradients(module, plain)
    smp.shutdown()
    return compared


@pytest.mark.parametrize("hooked", HOOKED)
@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_loss_on_features_that_inner_hooks_keep_trains_like_plain_pytorch(
    pool: Pools, stages: int, by_hand: bool, hooked: str
) -> None:
    found = pool(stages).run(train_on_what_hooks_keep, stages, by_hand, hooked)
    names = [name for name, _ in build().named_parameters()]
    assert sorted(name for item in found for name in item) == sorted(2 * names)


class Appending(Block):
    """Appends to a list of the script's what another would return."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        kept.tensors.append(out.square().mean())
        return out


def train_on_what_is_kept_late(by_hand: bool, appending: bool) -> str:
    """What is said of a loss on tensors that modules append, or hooks that come in the first forward."""
    torch.manual_seed(0)
    module = nn.Sequential(*[Appending() if appending else Block() for _ in range(LAYERS)])
    model = smp.DistributedModel(placed(module, 2, by_hand))

    @smp.step
    def step(x: Tensor) -> None:
        if not appending and not module[0].gate._forward_hooks:
            for block in module:
                hook_after(block)
        model.backward(with_penalty(model, x))

    try:
        step(data())
    except SMPUnsupportedError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("by_hand", "appending"), [(False, True), (True, True), (True, False)], ids=["list", "list", "hooks"]
)
def test_what_leaves_a_module_unseen_does_not_get_into_the_loss(by_hand: bool, appending: bool) -> None:
    for outcome in run_once(2, train_on_what_is_kept_late, by_hand, appending):
        assert outcome.kind == "value", outcome.text
        assert "got out of it by another way than its result" in outcome.value


def train_where_the_dry_run_fails() -> tuple[list[str], list[str]]:
    """Warnings, and names of the parameters whose gradients have been compared."""
    plain, module = build(), build()
    for block in module:
        block.gate.register_forward_hook(lambda *_: None)
    for part in data().chunk(MICROBATCHES):
        torch.autograd.backward(plain(part).square().mean() / MICROBATCHES)
    model = smp.DistributedModel(placed(module, 2, True))

    @smp.step
    def step(x: Tensor) -> None:
        if smp.is_tracing():
            raise RuntimeError("not now")
        model.backward(model(x).square().mean())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(data())
    smp.shutdown()
    return [str(warning.message) for warning in caught], equal_gradients(module, plain)


def test_a_dry_run_that_fails_is_done_without(pool: Pools) -> None:
    (first, some), (_, others) = pool(2).run(train_where_the_dry_run_fails)
    assert "failed: RuntimeError: not now. The step runs without it" in first[0]
    assert sorted(some + others) == sorted(name for name, _ in build().named_parameters())


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
        messages.append([f"{warning.filename}: {warning.message}" for warning in caught])
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
        assert len(after) == 1 and "'0.inner.0' got a forward hook" in after[0]
        assert after[0].startswith(__file__), "the step's call is what the warning points to"
