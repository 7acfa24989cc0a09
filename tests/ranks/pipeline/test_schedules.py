"""Every schedule: the results of plain PyTorch, and programs that no table foresees come to their end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.planning.policies.limits import in_flight
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import interleaved
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import Table, fused
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble, zero_bubble_h2
from tests.support.equality import Pools, Setup, compare, find
from tests.support.partitioned import restart

# Those of the settings, H2 with the memory that it needs, and with two pieces of the model a rank.
SCHEDULES = (
    "simple",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "zero_bubble H2",
    "searched",
    "v",
    "looped",
    "searched v",
)
MICROBATCHES = {2: 4, 3: 6, 4: 8}  # by stages


def ways(schedule: str, stages: int, microbatches: int, placements: Sequence[str]) -> Iterator[Setup]:
    """A model on so many stages."""
    name = schedule.removesuffix(" H2")
    config = {"active_microbatches": 2 * stages - 1} if name != schedule else {}
    for placement in placements:
        yield Setup(stages, microbatches, placement, name, config=config)


@pytest.mark.parametrize("stages", MICROBATCHES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_every_schedule_a_chain_trains_like_plain_pytorch(
    pool: Pools, schedule: str, stages: int
) -> None:
    # What the transformer adds, a value that skips stages, the programs below have on few stages.
    for name in ("perceptron", "transformer") if stages == 4 else ("perceptron",):
        for setup in ways(schedule, stages, MICROBATCHES[stages], ["automatic"]):
            wrong = compare(pool, "deep", find("deep", name), setup)
            assert not wrong, "\n".join(wrong)


UNFORESEEN = {
    "calls back and forth": ("wiring", "modules used twice", "looped"),
    "against the order": ("wiring", "skips", "reversed"),
    "a weight that two stages use": ("wiring", "tied weights", "automatic"),
    "two backwards": ("calls", "two backwards", "looped"),
    "branches that differ": ("branches", "branch that some microbatches take", "looped"),
}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_every_schedule_programs_end_that_no_table_foresees(
    pool: Pools, schedule: str, stages: int
) -> None:
    for family, name, placement in UNFORESEEN.values():
        for setup in ways(schedule, stages, 4, [placement]):
            wrong = compare(pool, family, find(family, name), setup)
            assert not wrong, "\n".join(wrong)


# --- memory ----------------------------------------------------------------------------------------------

WIDTH = 8


class Layer(nn.Linear):
    """Counts inputs that are there for the gradient of its weight, on this rank."""

    now = most = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = x * 1.0  # which nobody else has
        weakref.finalize(kept, Layer.count, -1)
        Layer.count(1)
        return torch.tanh(super().forward(kept))

    @staticmethod
    def count(more: int) -> None:
        Layer.now += more
        Layer.most = max(Layer.most, Layer.now)


def most_kept(layers: int, microbatches: int, settings: dict[str, Any]) -> int:
    """How many inputs of this rank's layers there were at once, in any of nine steps."""
    restart(microbatches=microbatches, **settings)
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[Layer() for _ in range(layers)]))

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    Layer.most = Layer.now = 0
    for _ in range(9):
        step(torch.ones(2 * microbatches, WIDTH))
        assert Layer.now == 0, "nothing is kept between steps"
    return Layer.most


def of(table: Table) -> list[int]:
    """What a table says that its ranks keep."""
    return play(table, {"F": 1.0, "B": 1.0, "W": 1.0}).kept


# What each rank may keep of as many microbatches as it has pieces, and the settings.
BOUNDS: dict[str, Callable[[int, int], list[int]]] = {
    "simple": lambda ranks, microbatches: of(fill_drain(ranks, microbatches)),
    "1f1b": lambda ranks, microbatches: in_flight(
        partitions=ranks, microbatches=microbatches, active_microbatches=ranks, chain=True
    ),
    "interleaved": lambda ranks, microbatches: of(zero_bubble(ranks, microbatches, min(2, ranks - 1))),
    "zero_bubble H2": lambda ranks, microbatches: of(zero_bubble_h2(ranks, microbatches)),
    "v": lambda ranks, microbatches: of(fused(zero_bubble_v(ranks, microbatches))),
    "looped": lambda ranks, microbatches: of(interleaved(ranks, microbatches, chunks=2)),
    "searched": lambda ranks, microbatches: [ranks + 2] * ranks,
    "searched v": lambda ranks, microbatches: [*[2 * ranks] * (ranks - 1), ranks],
}
IN_PIECES = ("v", "looped", "searched v")
SEARCHED = ("searched", "searched v")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", [name for name in BOUNDS if name not in SEARCHED])
def test_ranks_keep_no_more_than_the_table_of_their_schedule(pool: Pools, schedule: str, ranks: int) -> None:
    check_memory(pool, schedule, ranks)


@pytest.mark.parametrize("schedule", SEARCHED)
def test_an_order_that_is_searched_for_keeps_to_its_memory(pool: Pools, schedule: str) -> None:
    check_memory(pool, schedule, 3)  # a search for more takes longer


def check_memory(pool: Pools, schedule: str, ranks: int) -> None:
    microbatches = 3 * ranks
    [setup] = ways(schedule, ranks, microbatches, ["automatic"])
    pieces = 2 if schedule in IN_PIECES else 1
    settings = {"partitions": ranks, "pipeline": setup.schedule, **setup.config}
    if schedule == "1f1b":
        settings["active_microbatches"] = ranks
    if schedule in ("looped", "searched v"):
        settings |= {"pipeline": schedule.split()[0].replace("looped", "interleaved"), "virtual_stages": 2}
    found = pool(ranks).run(most_kept, pieces * ranks, microbatches, settings, backend="smddp")
    bounds = BOUNDS[schedule](ranks, microbatches)
    if schedule in ("v", "searched v"):
        bounds[-1] *= 2  # two layers, which microbatches pass at once
    assert all(most <= bound for most, bound in zip(found, bounds, strict=True)), (found, bounds)
    assert found[0] >= ranks, "a pipeline that is not filled keeps little"
