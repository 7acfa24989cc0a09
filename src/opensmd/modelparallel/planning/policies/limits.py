"""How many microbatches a rank may have under way at once, and how many of their backwards it takes apart.

Memory and waiting pull in two directions: whatever is between its forward and its backward keeps activations,
and a rank that has too little under way stands idle while a gradient is late. Pure.
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

MOST_AHEAD = 2  # forwards, beyond those that a chain must have under way


def most_active(partitions: int, wanted: int | None) -> int:
    """How many microbatches may be under way at once: the setting ``active_microbatches``, or its default."""
    return partitions + MOST_AHEAD if wanted is None else wanted


def window(*, partitions: int, stage: int, chain: bool, active_microbatches: int) -> int:
    """How many microbatches may be between forward and backward on a stage at once.

    In a chain the stage needs as many as there are stages from it to the end, and a few more, so that it has
    something to do while a gradient is late; the last stage needs one. Placements that come back to a stage
    need one for each stage everywhere. ``active_microbatches`` bounds all.
    """
    after = partitions - 1 - stage
    ahead = min(after, max(1, forwards_ahead(partitions, active_microbatches)))
    needed = after + ahead + 1 if chain else partitions
    return max(1, min(needed, active_microbatches))


def forwards_ahead(partitions: int, active_microbatches: int) -> int:
    """How many forwards further ahead a chain goes than it must, as far as memory and the chain allow."""
    return min(MOST_AHEAD, partitions - 1, max(0, active_microbatches - partitions))


def in_flight(*, partitions: int, microbatches: int, active_microbatches: int, chain: bool) -> list[int]:
    """How many microbatches' activations each stage holds at most between forward and backward."""
    return [
        min(
            microbatches,
            window(partitions=partitions, stage=stage, chain=chain, active_microbatches=active_microbatches),
        )
        for stage in range(partitions)
    ]


def split_backwards(*, stage: int, chain: bool, most: int, microbatches: int) -> int:
    """How many microbatches at once may have gradients of weights left on a stage.

    ``most`` bounds them, together with those between forward and backward, as what waits keeps activations.
    A first stage that nothing comes back to sends no gradients, and a single microbatch may look at its
    gradients as soon as it has had its backward.
    """
    if microbatches == 1 or (chain and stage == 0):
        return 0
    return min(most, microbatches)


def splits_at_the_end(*, stage: int, partitions: int, chain: bool, active_microbatches: int) -> int:
    """How many backwards of a step, its last, are split where splitting all of them costs more than it gains.

    Their gradients arrive earlier by what they leave for later, and what they leave fills the time in which
    the ranks before this one end. One more than ranks come before, as many as wait for each other then.
    """
    return min(stage + 1 if chain else partitions, active_microbatches)
