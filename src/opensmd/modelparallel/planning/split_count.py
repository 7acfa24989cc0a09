"""How many backwards of a step to split, given their times whole and in two parts; pure.

A split backward sends its gradients earlier, by what it leaves for later. But the two parts together take
longer: the graph is read and run twice, and what the second part reads is no longer in the caches. On two
ranks, only the last backwards gain anything: what they leave fills the time in which rank 0 finishes::

    all whole        rank 0   F3 B1 B1 .  B2 B2 .  B3 B3
                     rank 1   B1 B1 F2 B2 B2 F3 B3 B3

    the last two     rank 0   F3 B1 B1 .  B2 B2 B3 B3
    in two parts     rank 1   B1 B1 F2 B2 F3 B3 W2 W3

On more ranks, all of them may gain, because the ranks in the middle wait for gradients from the start. So may
two ranks in a V: the first gradient comes back through half a stage of every rank, and earlier by what each
of them leaves for later.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BackwardTimes", "split_count"]


class BackwardTimes(NamedTuple):
    """The times of a rank's backward of one microbatch, in any unit.

    Attributes:
        whole: unsplit.
        first: the first of two parts.
        weights: the second part, which computes weight gradients.
    """

    whole: float
    first: float
    weights: float


# As a share of the whole, whatever was measured: the last backwards may have had all memory bandwidth.
COSTS_AT_LEAST = 0.02
SEEN = 0.05  # savings below this share of a backward cannot be measured reliably


def split_count(
    times: BackwardTimes, *, stage: int, partitions: int, microbatches: int, few: int, in_a_v: bool = False
) -> int:
    """Return how many backwards, counted from the last, gain more than they cost if split.

    Args:
        times: the measured times.
        stage: this rank's position in the pipeline.
        partitions: the number of partitions.
        microbatches: those of a step.
        few: how many to split if splitting all does not pay.
        in_a_v: whether each rank has two stages, and the first rank that of the loss.

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
    # The cost of the last ones is hidden by the backwards that earlier ranks still have to run.
    return few if few * lost <= max(stage, 1) * times.whole else 0
