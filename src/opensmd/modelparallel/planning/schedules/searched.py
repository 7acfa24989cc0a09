"""Searching for a table, given the times of the stages and the memory of the ranks.

The published tables assume that all stages take equally long, and that F, B and W do. Otherwise, other tables
are shorter. The search starts with the published tables that fit the memory, and those of list scheduling by
several rules (:mod:`.listing`). Then the shortest is changed for as long as the search may run: one action
moves within its row, and the change stays unless the step gets longer.

Three ranks and four microbatches; the middle rank's backwards take two ticks, everything else one::

    H1         F0 F1 F2 .  .  .  B0 W0 F3 B1 W1 .  .  B2 W2 .  B3 W3
               .  F0 F1 .  B0 B0 F2 B1 B1 W0 F3 B2 B2 W1 B3 B3 W2 W3
               .  .  F0 B0 F1 B1 .  F2 B2 W0 .  F3 B3 W1 W2 W3

    searched   F0 F1 F2 .  .  .  B0 W0 F3 B1 W1 .  B2 .  B3 W2 W3
               .  F0 F1 F2 B0 B0 B1 B1 W0 F3 B2 B2 B3 B3 W1 W2 W3
               .  .  F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3

The search uses a fixed random seed, so the same arguments give the same table in every job.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.listing import RULES, listed
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import (
    interleaved,
    one_forward_one_backward,
)
from opensmd.modelparallel.planning.schedules.playing import Played, play
from opensmd.modelparallel.planning.schedules.tables import (
    Action,
    ChunkTimes,
    Table,
    fused,
    in_a_v,
    looped,
    require_counts,
)
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = ["published", "searched"]

NAME = "searched"
# the number of actions simulated in total: about a second
EFFORT = 300_000
FARTHEST = 4  # the most places that an action moves at once
SAME_TIME = 1 - 1e-9


def searched(
    stages: Sequence[Sequence[int]],
    times: Sequence[ChunkTimes],
    microbatches: int,
    *,
    most_kept: int | Sequence[int],
    effort: int = EFFORT,
) -> Table:
    """Return the shortest table found; never longer than the best published one within the same memory.

    Args:
        stages: those of each rank, by chunk, counted in forward order (:func:`.tables.looped`,
            :func:`.tables.in_a_v`, also after :func:`.tables.fused`).
        times: those of each stage.
        microbatches: those of the step.
        most_kept: for how many microbatches, counted once per chunk, every rank may keep activations.
        effort: how many actions the search simulates at most.

    Raises:
        ValueError: there are no ranks, microbatches or chunks, the times do not fit them, or not even one
            microbatch may be kept.
    """
    ranks, chunks = len(stages), [len(own) for own in stages]
    require_counts(ranks, microbatches, chunks or [0])
    if sum(chunks) != len(times):
        raise ValueError(f"{sum(chunks)} stages need {sum(chunks)} times, got {len(times)}")
    limits = [most_kept] * ranks if isinstance(most_kept, int) else list(most_kept)
    for rank, (limit, own) in enumerate(zip(limits, chunks, strict=True)):
        if limit < own:
            raise ValueError(
                f"rank {rank} keeps at least one microbatch in each of its {own} chunks; most_kept is {limit}"
            )
    best = _shortest_beginning(stages, times, microbatches, limits)
    return _improved(best, times, limits, effort)


def published(stages: Sequence[Sequence[int]], microbatches: int) -> Iterator[Table]:
    """Return the published tables for ranks with these stages."""
    ranks = len(stages)
    layout = tuple(map(tuple, stages))
    chunks = len(layout[0])
    if layout == looped(ranks):
        for make in (one_forward_one_backward, zero_bubble_h1, zero_bubble_h2, fill_drain):
            yield make(ranks, microbatches)
    elif layout == in_a_v(ranks):
        yield zero_bubble_v(ranks, microbatches)
    elif layout == fused(zero_bubble_v(ranks, microbatches)).stages:
        yield fused(zero_bubble_v(ranks, microbatches))
    elif layout == looped(ranks, chunks) and microbatches % ranks == 0:
        yield interleaved(ranks, microbatches, chunks=chunks)


def _shortest_beginning(
    stages: Sequence[Sequence[int]], times: Sequence[ChunkTimes], microbatches: int, limits: Sequence[int]
) -> Table:
    layout = tuple(map(tuple, stages))
    tables = [Table(NAME, _split(table), layout) for table in published(stages, microbatches)]
    for rule in RULES:
        rows = listed(stages, times, microbatches, limits, rule)
        if rows is not None:
            tables.append(Table(NAME, rows, layout))
    tables.append(Table(NAME, tuple(_one_by_one(len(own), microbatches) for own in stages), layout))
    played = [(table, play(table, times)) for table in tables]
    fitting = [(table, result) for table, result in played if _fits(result, limits)]
    return min(fitting, key=lambda pair: pair[1].seconds)[0]


def _split(table: Table) -> tuple[tuple[Action, ...], ...]:
    """Return a table's rows with separate weight gradients; if it has none, right after their backward."""
    if table.splits:
        return table.rows
    return tuple(
        tuple(
            part
            for action in row
            for part in ((action, action._replace(kind="W")) if action.kind == "B" else (action,))
        )
        for row in table.rows
    )


def _one_by_one(chunks: int, microbatches: int) -> tuple[Action, ...]:
    """Return one microbatch after the other, which needs the least memory."""
    row: list[Action] = []
    for microbatch in range(microbatches):
        row += [Action("F", microbatch, chunk) for chunk in range(chunks)]
        for chunk in reversed(range(chunks)):
            row += [Action("B", microbatch, chunk), Action("W", microbatch, chunk)]
    return tuple(row)


def _fits(played: Played, limits: Sequence[int]) -> bool:
    return all(kept <= limit for kept, limit in zip(played.kept, limits, strict=True))


def _improved(table: Table, times: Sequence[ChunkTimes], limits: Sequence[int], effort: int) -> Table:
    """Return ``table`` after as many changes as the effort allows, none of which makes it longer."""
    draw = random.Random(0)
    best, seconds = table, play(table, times).seconds
    for _ in range(effort // sum(map(len, table.rows))):
        changed = _with_one_moved(best, draw)
        if changed is None:
            continue
        try:
            played = play(changed, times)
        except ValueError:  # a deadlock
            continue
        if played.seconds <= seconds and _fits(played, limits):
            best, seconds = changed, played.seconds
    return best if seconds < SAME_TIME * play(table, times).seconds else table


def _with_one_moved(table: Table, draw: random.Random) -> Table | None:
    """Return ``table`` with one action elsewhere in its row; None if something must stay before it."""
    number = draw.randrange(len(table.rows))
    row = list(table.rows[number])
    if len(row) == 1:
        return None
    place = draw.randrange(len(row))
    target = max(0, min(len(row) - 1, place + draw.choice((-1, 1)) * draw.randint(1, FARTHEST)))
    action = row.pop(place)
    passed = row[min(place, target) : max(place, target)]
    if any(_must_keep_order(action, other) for other in passed):
        return None
    row.insert(target, action)
    rows = (*table.rows[:number], tuple(row), *table.rows[number + 1 :])
    return Table(table.name, rows, table.stages)


def _must_keep_order(one: Action, other: Action) -> bool:
    """Whether two actions must keep their order: those of one microbatch, or of one kind in one chunk."""
    return one.microbatch == other.microbatch or (one.kind, one.chunk) == (other.kind, other.chunk)
