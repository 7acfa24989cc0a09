"""How many backwards of a step to take apart, from what they take whole and in two parts. Pure.

A backward in two parts sends its gradients earlier, by what it leaves for later, and the two parts together
take longer than the whole: a graph is read and run twice, and what the second part reads has left the caches.
On two ranks only the last ones gain anything. What they leave fills the time in which rank 0 ends::

    all whole        rank 0   F3 B1 B1 .  B2 B2 .  B3 B3
                     rank 1   B1 B1 F2 B2 B2 F3 B3 B3

    the last two     rank 0   F3 B1 B1 .  B2 B2 B3 B3
    in two parts     rank 1   B1 B1 F2 B2 F3 B3 W2 W3

On more ranks all of them may gain, as the ranks in the middle wait for gradients from the beginning. In a V
so do two: the first gradient comes back through half a stage of every rank, and what each leaves for later
there makes it come earlier.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BackwardTimes", "split_count"]


class BackwardTimes(NamedTuple):
    """What a rank's backward takes of one microbatch, in any unit.

    Attributes:
        whole: in one.
        first: its first part of two.
        weights: its second part, which computes weight gradients.
    """

    whole: float
    first: float
    weights: float


# As a share of the whole, whatever was measured: the last backwards may have had the memory to themselves.
COSTS_AT_LEAST = 0.02
SEEN = 0.05  # a backward shortened by a smaller share than this is no shorter for all that can be measured


def split_count(
    times: BackwardTimes, *, stage: int, partitions: int, microbatches: int, few: int, in_a_v: bool = False
) -> int:
    """How many backwards, from the last, gain more than they cost in two parts.

    Args:
        times: measured.
        stage: this rank of the pipeline.
        partitions: how many there are.
        microbatches: of a step.
        few: how many are split where splitting all does not pay.
        in_a_v: each rank has two stages, and the first one that of the loss.

    Returns:
        0, ``few`` or ``microbatches``.
    """
    gained = times.whole - times.first
    lost = max(COSTS_AT_LEAST * times.whole, times.first + times.weights - times.whole)
    if gained <= SEEN * times.whole:
        return 0
    # Each further rank passes its gain on to the ranks before it; the costs add up on each.
    passed_on = (partitions - 1) / 2 if in_a_v else partitions - 2
    if passed_on and passed_on * gained > lost * (microbatches - few):
        return microbatches
    # What the last ones cost is hidden by the backwards that ranks before this one still have to run.
    return few if few * lost <= max(stage, 1) * times.whole else 0
