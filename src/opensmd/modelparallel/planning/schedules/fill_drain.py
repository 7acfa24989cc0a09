"""Fill and drain: all forwards, then all backwards (GPipe, arXiv:1811.06965); ``"simple"`` in the settings.

Three ranks, three microbatches, a backward of two ticks::

    F0 F1 F2 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2
    .  F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
    .  .  F0 F1 F2 B0 B0 B1 B1 B2 B2

Every rank keeps the activations of all microbatches.
"""

from __future__ import annotations

from opensmd.modelparallel.planning.schedules.tables import Action, Table, looped, require_counts

__all__ = ["fill_drain"]


def fill_drain(ranks: int, microbatches: int) -> Table:
    """Return the table of ``ranks`` stages.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    require_counts(ranks, microbatches)
    row = (
        *(Action("F", microbatch) for microbatch in range(microbatches)),
        *(Action("B", microbatch) for microbatch in range(microbatches)),
    )
    return Table("fill-drain", (row,) * ranks, looped(ranks))
