"""How many microbatches a rank may have in flight, and how many of their backwards it splits.

Memory and waiting pull in opposite directions: microbatches between forward and backward keep activations,
but a rank with too few of them is idle while a gradient is late. Pure.
"""

from __future__ import annotations

__all__ = [
    "MOST_AHEAD",
    "forwards_ahead",
    "in_flight",
    "most_active",
    "split_backwards",
    "splits_at_the_end",
    "window",
]

MOST_AHEAD = 2  # forwards, beyond those that a chain must have in flight


def most_active(partitions: int, wanted: int | None) -> int:
    """Return how many microbatches may be in flight: the setting ``active_microbatches``, or its default."""
    return partitions + MOST_AHEAD if wanted is None else wanted


def window(*, partitions: int, stage: int, chain: bool, active_microbatches: int) -> int:
    """Return how many microbatches may be between forward and backward on a stage.

    In a chain, a stage needs as many as there are stages from it to the end, plus a few to work on while a
    gradient is late; the last stage needs one. Placements that return to a stage need as many as there are
    stages, everywhere. ``active_microbatches`` bounds all.
    """
    after = partitions - 1 - stage
    ahead = min(after, max(1, forwards_ahead(partitions, active_microbatches)))
    needed = after + ahead + 1 if chain else partitions
    return max(1, min(needed, active_microbatches))


def forwards_ahead(partitions: int, active_microbatches: int) -> int:
    """Return how many extra forwards a chain runs ahead, as far as memory and the chain allow."""
    return min(MOST_AHEAD, partitions - 1, max(0, active_microbatches - partitions))


def in_flight(*, partitions: int, microbatches: int, active_microbatches: int, chain: bool) -> list[int]:
    """Return how many microbatches' activations each stage holds at most between forward and backward."""
    return [
        min(
            microbatches,
            window(partitions=partitions, stage=stage, chain=chain, active_microbatches=active_microbatches),
        )
        for stage in range(partitions)
    ]


def split_backwards(*, stage: int, chain: bool, most: int, microbatches: int) -> int:
    """Return how many microbatches may have pending weight gradients on a stage.

    ``most`` bounds them together with those between forward and backward, because both keep activations. A
    first stage that microbatches do not return to sends no gradients, and a single microbatch may read its
    gradients right after its backward.
    """
    if microbatches == 1 or (chain and stage == 0):
        return 0
    return min(most, microbatches)


def splits_at_the_end(*, stage: int, partitions: int, chain: bool, active_microbatches: int) -> int:
    """Return how many of a step's last backwards to split if splitting all costs more than it gains.

    Their gradients arrive earlier by what they leave for later, which then fills the time in which the ranks
    before this one finish. It is one more than there are ranks before, as many as wait for each other then.
    """
    return min(stage + 1 if chain else partitions, active_microbatches)
