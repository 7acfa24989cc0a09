"""What a schedule's own table allows: the share of the ideal without a bubble."""

from __future__ import annotations

from collections.abc import Callable

from opensmd.modelparallel.planning.policies.limits import most_active
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import searched
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes, Table, looped
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = ["ALONE", "BUSIEST", "BY_HAND", "LOOPED", "OURS", "SLEPT", "bound"]

ALONE = "layers alone"  # in plain PyTorch: no schedule can do better than the bound of its table times this

# The table of "v" without a runtime
BY_HAND = "v by hand"

# After the name of a candidate: what its ranks have slept, and the busiest one's time.
SLEPT, BUSIEST = ", slept", ", busiest rank"

LOOPED = "looped"  # "interleaved" with two pieces of the model a rank


def _looped(ranks: int, microbatches: int) -> Table:
    return interleaved(ranks, microbatches, chunks=2)


def _searched(ranks: int, microbatches: int) -> Table:
    times = [ChunkTimes(1.0, 1.0, 1.0)] * ranks
    return searched(looped(ranks), times, microbatches, most_kept=most_active(ranks, None))


OURS: dict[str, Callable[[int, int], Table]] = {
    "v": zero_bubble_v,
    "interleaved": zero_bubble_h1,  # as long as with forwards further ahead
    "zero_bubble": zero_bubble_h2,
    "searched": _searched,
    LOOPED: _looped,
    "1f1b": one_forward_one_backward,
    "simple": fill_drain,
}


def bound(schedule: str, ranks: int, microbatches: int) -> float:
    """The share that the table of one of our schedules allows if F, B and W take the same time."""
    table = OURS[schedule](ranks, microbatches)
    played = play(table, {"F": 1.0, "B": 1.0, "W": 1.0})
    return 3 * len(table.stages[0]) * microbatches / played.seconds
