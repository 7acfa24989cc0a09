"""Zero bubble: backwards in two parts, and weight gradients where a rank would wait (arXiv:2401.10241).

Three ranks, five microbatches, every action one tick. *H1* keeps what 1F1B keeps on its first rank and
shortens the bubble to a third; *H2* keeps nearly twice as much and has no bubble between a rank's first
action and its last::

    H1   F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
         .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
         .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4

    H2   F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
         .  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
         .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
"""

from __future__ import annotations

from dataclasses import replace

from opensmd.modelparallel.planning.schedules.tables import Action, Table, looped, require_counts

__all__ = ["zero_bubble", "zero_bubble_h1", "zero_bubble_h2"]


def zero_bubble(ranks: int, microbatches: int, more: int) -> Table:
    """Return H1 with up to ``more`` extra forwards ahead; no rank keeps over ``ranks + more`` microbatches.

    A rank that is so far ahead still has something to do while a gradient is late.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    require_counts(ranks, microbatches)
    later_ranks = range(ranks - 1, -1, -1)
    warmups = [count + min(more, count) for count in later_ranks]
    rows = tuple(_row(microbatches, ahead, ranks - 1 + more - ahead) for ahead in warmups)
    return Table(f"zero bubble, {ranks + more} kept", rows, looped(ranks))


def zero_bubble_h1(ranks: int, microbatches: int) -> Table:
    """Return the table of ``ranks`` stages: no rank keeps more microbatches than there are ranks.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    return replace(zero_bubble(ranks, microbatches, 0), name="zero bubble H1")


def zero_bubble_h2(ranks: int, microbatches: int) -> Table:
    """Return the table of ``ranks`` stages: no rank keeps more than 2 * ranks - 1 microbatches.

    Raises:
        ValueError: there are no ranks or no microbatches.
    """
    return replace(zero_bubble(ranks, microbatches, ranks - 1), name="zero bubble H2")


def _row(microbatches: int, ahead: int, left: int) -> tuple[Action, ...]:
    """Return ``ahead`` forwards, then alternate F and B; weight gradients follow ``left`` backwards later."""
    ahead = min(ahead, microbatches)
    row = [Action("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            row.append(Action("F", ahead + microbatch))
        row.append(Action("B", microbatch))
        if microbatch >= left:
            row.append(Action("W", microbatch - left))
    first = max(0, microbatches - left)
    return (*row, *(Action("W", microbatch) for microbatch in range(first, microbatches)))
