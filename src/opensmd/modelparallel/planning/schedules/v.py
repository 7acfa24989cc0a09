"""V: two chunks per rank, down the ranks and up again, with separate weight gradients (arXiv:2401.10241, 6).

The first rank has the first and the last stage, so losses and first gradients are where microbatches start.
If F, B and W take equally long, there is no bubble between a rank's first action and its last, and a rank
keeps no more than 1F1B does on its first. Two ranks, four microbatches (the second chunk is ``a``)::

    F0 F1 F2 F0a B0a W0a F1a B1a W1a F3 B0 W0 F2a B2a W2a B1 W1 F3a B3a W3a B2 W2 B3 W3
    .  F0 F0a F1 F1a B0a W0a F2 B0 W0 F2a B1a W1a F3 B1 W1 F3a B2a W2a B2 B3a B3 W2 W3a W3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from opensmd.modelparallel.planning.schedules.tables import (
    Action,
    Kind,
    Table,
    in_a_v,
    require_counts,
)

__all__ = ["zero_bubble_v"]


def zero_bubble_v(ranks: int, microbatches: int) -> Table:
    """Return the table of ``ranks`` with two stages each.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    require_counts(ranks, microbatches)
    # Too few microbatches to fill the pipeline: as if there were enough, with the extra ones left out.
    played = max(microbatches, 2 * ranks - 1)
    rows = tuple(
        tuple(action for action in _row(rank, ranks, played) if action.microbatch < microbatches)
        for rank in range(ranks)
    )
    return Table("zero bubble V", rows, in_a_v(ranks))


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Return a rank's row if microbatches fill the pipeline, which takes 2 * ranks - 1."""
    counts: Counter[tuple[Kind, int]] = Counter()

    def following(kinds: str, chunk: int) -> Iterator[Action]:
        for kind in kinds:
            assert kind in ("F", "B", "W")
            yield Action(kind, counts[kind, chunk], chunk)  # type: ignore[index, arg-type]
            counts[kind, chunk] += 1  # type: ignore[index]

    down, up = 0, 1
    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch comes back up
        yield from following("F", down)
    for _ in range(rank):  # until its gradient arrives
        yield from following("F", up)
        yield from following("F", down)
    for _ in range(ranks - rank):  # until its gradient has been to the last rank and back
        yield from following("FBW", up)
    while counts["F", up] < microbatches:
        if counts["F", down] < microbatches:
            yield from following("F", down)
        yield from following("BW", down)
        yield from following("FBW", up)
    for _ in range(rank):  # others wait for these gradients, but not for those of weights
        yield from following("B", down)
        yield from following("B", up)
    while counts["B", down] < microbatches:
        yield from following("BW", down)
    for chunk in (up, down):
        while counts["W", chunk] < microbatches:
            yield from following("W", chunk)
