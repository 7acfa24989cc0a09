"""Attributes of modules that forwards and hooks set: each microbatch's own, and afterwards the last one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, equal_gradients, train_beside
from tests.support.partitioned import restart

WIDTH, MICROBATCHES, STEPS = 8, 4, 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def keep_output(module: nn.Module, given: Any, out: Tensor) -> None:
    module.seen = out.detach()


def keep_gradient(module: nn.Module, into: Any, out: tuple[Tensor, ...]) -> None:
    module.gradient = out[0]


def watch(module: nn.Module) -> nn.Module:
    for layer in module:
        layer.register_forward_hook(keep_output)
        layer.register_full_backward_hook(keep_gradient)
    return module


def what_is_left(looped: bool) -> list[int]:
    """Train; the layers on this rank, whose attributes have been compared with plain PyTorch's."""
    restart(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    plain, module = watch(build()), watch(build())
    for number, layer in enumerate(module.children()):
        smp.set_partition(layer, number % 2 if looped else number // 2)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    for number in range(STEPS):
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(number))
        step(x)
        for part in x.chunk(MICROBATCHES):
            torch.autograd.backward(plain(part).square().mean() / MICROBATCHES)
        local = [name for name, _ in module.named_children() if model.is_local(f"{name}.0.weight")]
        for name in local:
            for attribute in ("seen", "gradient"):
                mine = getattr(module.get_submodule(name), attribute)
                torch.testing.assert_close(mine, getattr(plain.get_submodule(name), attribute))
    return [int(name) for name in local]


@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
def test_hooks_leave_what_the_last_microbatch_has_put_into_attributes(pool: Pools, looped: bool) -> None:
    found = pool(2).run(what_is_left, looped)
    assert sorted(found) == ([[0, 2], [1, 3]] if looped else [[0, 1], [2, 3]])


class Counting(nn.Module):
    """Computes with how often it has been called, as warm-ups do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.state = nn.Linear(WIDTH, WIDTH), 0, {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.state["calls"] += 1
        out: Tensor = torch.tanh(self.layer(x)) / (self.calls + self.state["calls"])
        return out


class Counted(nn.Module):
    """Counts too, and asks its layers, which it counts in each forward; it notes what depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting() for _ in range(4))
        self.calls, self.depth, self.longest, self.kind = 0, 0, 0.0, ""
        self.state: dict[str, Any] = {"calls": 0, "kind": ""}
        self.place = {"depth": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.state["calls"] += 1
        self.longest = x.abs().max().item()
        self.state["kind"] = self.kind = "long" if self.longest > 2 else "short"
        self.depth = self.place["depth"] = 0
        for layer in [*self.layers, *self.layers]:
            self.depth += 1
            self.place["depth"] += 2
            x = layer(x) * self.depth + x / self.place["depth"]
        scale = self.calls + self.state["calls"] + self.longest + len(self.kind + self.state["kind"])
        return x * scale + sum(layer.calls for layer in self.layers)


def train_placed(module: Counted | Resetting, plain: nn.Module, *, looped: bool) -> None:
    """Place the layers in turn, or the first half and the second, and train beside the plain module."""
    for number, layer in enumerate(module.layers):
        smp.set_partition(layer, number % 2 if looped else number // 2)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2 * MICROBATCHES, WIDTH, generator=generator),) for _ in range(STEPS)]
    train_beside(smp.DistributedModel(module), plain, batches, microbatches=MICROBATCHES)


def counted(looped: bool) -> None:
    restart(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    module, plain = Counted(), Counted()
    train_placed(module, plain, looped=looped)
    assert module.calls == plain.calls == module.state["calls"] == STEPS * MICROBATCHES
    assert [layer.calls for layer in module.layers] == [layer.calls for layer in plain.layers]
    smp.shutdown()


@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
def test_numbers_in_attributes_are_those_of_plain_pytorch(pool: Pools, looped: bool) -> None:
    pool(2).run(counted, looped)


class Masked(nn.Module):
    """Reads what its parent has set."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer, self.parent = nn.Linear(WIDTH, WIDTH), [parent]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.layer(x)) * self.parent[0].mask
        return out


class Resetting(nn.Module):
    """Computes what it needs where there is nothing yet, and forgets it at the end, in every way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *(Masked(self) for _ in range(3))])
        self.kept: Tensor | None = None
        self.states: list[Tensor] = []
        self.notes: dict[str, float] = {}
        self.made = False

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.layers[0](x)
        if not hasattr(self, "mask"):
            self.mask = x > 0
        if not self.states:
            self.states = [x.square()]
        if "scale" not in self.notes:
            self.notes["scale"] = x.abs().max().item()
        if not self.made:
            self.shift, self.made = x.detach().mean(0), True
        for layer in self.layers:
            x = layer(x) + self.shift
        out: Tensor = (x + self.kept + self.states[0]) * self.notes["scale"]
        self.kept, self.states, self.made = None, [], False
        self.notes.clear()
        del self.mask
        return out


def reset(looped: bool, pipeline: str) -> None:
    restart(
        partitions=2,
        microbatches=MICROBATCHES,
        auto_partition=False,
        default_partition=0,
        pipeline=pipeline,
    )
    module, plain = Resetting(), Resetting()
    train_placed(module, plain, looped=looped)
    smp.shutdown()


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
def test_no_microbatch_finds_what_another_one_has_yet_to_reset(
    pool: Pools, looped: bool, pipeline: str
) -> None:
    pool(2).run(reset, looped, pipeline)


class Checkpointed(nn.Module):
    """Has a checkpoint around what reads the mask, which backward therefore needs again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.last = Masked(self), nn.Linear(WIDTH, WIDTH)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = x > 0
        out: Tensor = self.last(checkpoint(self.masked, x, use_reentrant=False))
        return out


def reset_after_backward() -> None:
    restart(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    module, plain = Checkpointed(), Checkpointed()
    smp.set_partition(module.last, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())
        module.mask = None

    for _ in range(STEPS):
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
        step(x)
        for part in x.chunk(MICROBATCHES):
            torch.autograd.backward(plain(part).square().mean() / MICROBATCHES)
        assert module.mask is None
    assert equal_gradients(module, plain)
    smp.shutdown()


def test_a_backward_that_runs_later_finds_what_was_there_when_it_was_requested(pool: Pools) -> None:
    pool(2).run(reset_after_backward)
