"""Plans against the times of the first steps, and models that go on by a better plan."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.planning.measured import StageTimes
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.state import state
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]

LAYERS, WIDTH, ROWS = 8, 6, 4


class Slow(torch.autograd.Function):
    """Work that no estimate sees; as much in each layer."""

    seconds = 1.5e-3

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(Slow.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * Slow.seconds)
        return gradients[0].clone()


class Layer(nn.Linear):
    """All are equal in time; what they differ in is the size of a parameter that is hardly used."""

    def __init__(self, ballast: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.ballast = nn.Parameter(torch.ones(ballast))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(super().forward(x))
        out: Tensor = Slow.apply(hidden * self.ballast[0])  # type: ignore[no-untyped-call]
        return out


class Net(nn.Sequential):
    """Replaces a buffer by what the last stage computes."""

    scale: Tensor

    def __init__(self, *layers: Layer) -> None:
        super().__init__(*layers)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * self.scale)
        self.scale = 0.5 * self.scale + out.detach().mean(0)
        return out


def build(heavy: int) -> nn.Sequential:
    torch.manual_seed(5)
    return Net(*[Layer(20_000 if index < heavy else 1) for index in range(LAYERS)])


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(ROWS, WIDTH, generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def is_whole(step: int) -> bool:
    """Whether gradients are applied that have added up: not before parts move, so that these move, too."""
    return step % 2 == 0


def in_plain_pytorch(kind: str, heavy: int, steps: int) -> list[float]:
    model = build(heavy)
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for number, batch in enumerate(batches(steps)):
        loss = sum(model(rows).square().mean() / 4 for rows in batch.chunk(4))
        assert isinstance(loss, Tensor)
        loss.backward()
        losses.append(loss.item())
        if is_whole(number):
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Heard(logging.Handler):
    """The warnings of the planner."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    handler = Heard()
    logger = logging.getLogger("opensmd.modelparallel")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def leave_optimizer(model: nn.Module) -> None:
    """Another optimizer that nobody has any more, which only the second rank's garbage collector has seen."""
    unused: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    unused.itself = unused
    gc.collect()
    del unused
    if smp.rank() == 1:
        gc.collect()


def trained(kind: str, heavy: int, steps: int, **settings: Any) -> dict[str, Any]:
    """Train a model that is placed by sizes alone, and see what became of it; ``kind`` "" trains nothing."""
    restart(microbatches=4, skip_tracing=True, **settings)
    model = smp.DistributedModel(build(heavy))
    optimizer = None
    if kind == "momentum":
        leave_optimizer(model)
    if kind:
        optimizer = smp.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))

    @smp.step
    def step(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        model.backward(loss)
        return loss

    losses, places = [], []
    with heard() as texts:
        for number, batch in enumerate(batches(steps)):
            loss = step(batch)
            if optimizer is not None and is_whole(number):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.reduce_mean().item())
            assert model.plan is not None
            places.append([model.plan.homes[str(layer)] for layer in range(LAYERS)])
        whole = model.state_dict()
        return {
            "losses": losses,
            "places": places,
            "said": texts,
            "calls": [whole[f"{layer}.calls"].item() for layer in range(LAYERS)],
            "state": sorted(optimizer.state_dict()["state"]) if optimizer else [],
            "own": len(optimizer.param_groups[0]["params"]) if optimizer else 0,
        }


@contextmanager
def a_quiet_machine() -> Iterator[None]:
    """Stages take as long as they have layers, and not at all: a busy machine must not change a plan."""

    def as_long_as_layers(engine: Engine) -> list[StageTimes]:
        layers = sum(
            engine.plan.homes[str(layer)] == state.groups.rank_in(CommGroup.PP_GROUP)
            for layer in range(LAYERS)
        )
        return [StageTimes(0.01 * layers, 0.02 * layers)] * 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "times_of_microbatches", as_long_as_layers)
        patch.setattr(Slow, "seconds", 0.0)
        yield


def check_replanned(partitions: int, kind: str, heavy: int, settings: dict[str, Any]) -> None:
    with a_quiet_machine():
        plain = in_plain_pytorch(kind, heavy, 5)
        found = trained(kind, heavy, 5, partitions=partitions, replan=True, **settings)
    first, second, third = found["places"][0], found["places"][1], found["places"][2]
    assert first == second != third, "parts move once, after the second step"
    assert third == [layer * partitions // LAYERS for layer in range(LAYERS)], third
    assert found["losses"] == pytest.approx(plain, rel=1e-6), "as if nothing had happened"
    assert found["calls"] == [20.0] * LAYERS, "buffers have moved, too"
    assert found["state"] == list(range(3 * LAYERS)), "every parameter's state is somewhere, once"
    assert found["own"] == 3 * LAYERS // partitions
    if state.rank == 0:
        assert [text for text in found["said"] if "It is followed from the next step on" in text]


@pytest.mark.parametrize(
    ("size", "partitions", "kind", "heavy", "settings"),
    [
        (2, 2, "adam", 1, {}),
        (4, 4, "momentum", 3, {"pipeline": "searched"}),
        (4, 2, "momentum", 1, {"ddp": True}),
    ],
)
def test_a_misplaced_model_moves_after_two_steps_without_touching_its_losses(
    pool: Pools, size: int, partitions: int, kind: str, heavy: int, settings: dict[str, Any]
) -> None:
    pool(size).run(check_replanned, partitions, kind, heavy, settings)


def check_what_is_said() -> None:
    with a_quiet_machine():
        found = trained("momentum", 1, 3, partitions=2)
    assert found["places"][0] == found["places"][2], "nobody has asked for a move"
    assert found["places"][0] != [0, 0, 0, 0, 1, 1, 1, 1]
    said = [text for text in found["said"] if "planned" in text]
    assert len(said) == (state.rank == 0), "once, on rank 0"
    if said:
        assert "to partition 0" in said[0] and "% less" in said[0] and '"replan": True' in said[0], said

    with a_quiet_machine():
        found = trained("", 1, 3, partitions=2, replan=True)
    assert found["places"][0] == found["places"][2]
    if state.rank == 0:
        assert [text for text in found["said"] if "no smp.DistributedOptimizer" in text]


def test_other_times_than_planned_are_said_once_and_so_is_why_a_model_cannot_move(pool: Pools) -> None:
    pool(2).run(check_what_is_said)


def check_times_of_microbatches() -> None:
    trained("momentum", 1, 1, partitions=2)
    engine = state.engine
    assert engine is not None
    layers = sum(engine.plan.homes[str(layer)] == state.rank for layer in range(LAYERS))
    times = engine.times_of_microbatches()
    assert len(times) == 4 and layers
    for each in times:
        assert each.forward >= layers * Slow.seconds and each.backward >= 2 * layers * Slow.seconds


def test_what_microbatches_take_on_a_stage_is_what_its_layers_do(pool: Pools) -> None:
    pool(2).run(check_times_of_microbatches)
