"""What a schedule's own table allows: the share of the ideal without a bubble."""

from __future__ import annotations

from collections.abc import Callable

from opensmd.modelparallel.planning.schedules.one_forward_one_backward import one_forward_one_backward
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import Table
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = ["ALONE", "OURS", "bound"]

ALONE = "layers alone"  # in plain PyTorch: no schedule can do better than the bound of its table times this

OURS: dict[str, Callable[[int, int], Table]] = {
    "v": zero_bubble_v,
    "interleaved": zero_bubble_h1,  # as long as with forwards further ahead
    "zero_bubble": zero_bubble_h2,
    "1f1b": one_forward_one_backward,
}


def bound(schedule: str, ranks: int, microbatches: int) -> float:
    """The share that the table of one of our schedules allows if F, B and W take the same time."""
    played = play(OURS[schedule](ranks, microbatches), {"F": 1.0, "B": 1.0, "W": 1.0})
    chunks = 2 if schedule == "v" else 1
    return 3 * chunks * microbatches / played.seconds
