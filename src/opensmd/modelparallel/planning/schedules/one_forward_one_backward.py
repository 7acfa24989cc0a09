"""1F1B: each rank alternates forwards and backwards once its window is full; plain and interleaved.

Three ranks, four microbatches, a backward of two ticks (arXiv:1806.03377)::

    F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

Rank r of P keeps the activations of P - r microbatches. Interleaved (arXiv:2104.04473), a rank has several
chunks, and microbatches go through the first chunks of all ranks, P at a time, before the second ones. The
bubble is shorter by a factor of the number of chunks, but more microbatches are kept.
"""

from __future__ import annotations

from opensmd.modelparallel.planning.schedules.tables import Action, Table, looped, require_counts

__all__ = ["interleaved", "one_forward_one_backward"]


def one_forward_one_backward(ranks: int, microbatches: int) -> Table:
    """Return the table of ``ranks`` stages.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    require_counts(ranks, microbatches)
    return Table("1F1B", interleaved(ranks, microbatches, chunks=1).rows, looped(ranks))


def interleaved(ranks: int, microbatches: int, *, chunks: int) -> Table:
    """Return the table of ``ranks`` with ``chunks`` stages each.

    Raises:
        ValueError: there are several chunks, and the number of ranks does not divide the microbatches.
    """
    require_counts(ranks, microbatches, [chunks])
    if chunks > 1 and microbatches % ranks:
        raise ValueError(
            f"interleaved 1F1B takes microbatches in groups of as many as there are ranks: {ranks} ranks do "
            f"not divide {microbatches} microbatches"
        )
    rows = tuple(_row(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return Table(f"interleaved 1F1B, {chunks} chunks", rows, looped(ranks, chunks))


def _row(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    forwards = [_turn(turn, ranks, chunks) for turn in range(microbatches * chunks)]
    backwards = [Action("B", first.microbatch, chunks - 1 - first.chunk) for first in forwards]
    # One chunk: the ranks after this one. More: twice that, plus the whole first rounds.
    ahead = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    ahead = min(ahead, len(forwards))
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - ahead :])


def _turn(turn: int, ranks: int, chunks: int) -> Action:
    """Return the ``turn``-th forward: groups of as many microbatches as ranks, chunk after chunk."""
    if chunks == 1:
        return Action("F", turn)
    group, place = divmod(turn, ranks * chunks)
    return Action("F", group * ranks + place % ranks, place // ranks)
