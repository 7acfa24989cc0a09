"""A schedule as a table: for every rank, the order of its actions and its stages.

A rank may have several chunks of the model. With two ranks and two chunks each, the model's four stages are
placed::

    looped   rank 0: 0 2    in a V   rank 0: 0 3
             rank 1: 1 3             rank 1: 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Action", "ChunkTimes", "Kind", "Table", "fused", "in_a_v", "looped", "require_counts"]

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """An action of a rank for one microbatch.

    Attributes:
        kind: "F" for forward, "B" for backward, "W" for weight gradients, which a B includes if the table has
            no W.
        microbatch: its number in the step.
        chunk: the rank's chunk, counted in forward order.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}{chr(ord('a') + self.chunk - 1) if self.chunk else ''}"


class ChunkTimes(NamedTuple):
    """Seconds of one microbatch in one stage; ``weights`` is 0 if the backward includes them."""

    forward: float
    backward: float
    weights: float

    def of(self, kind: Kind) -> float:
        """Return the seconds of one action."""
        return {"F": self.forward, "B": self.backward, "W": self.weights}[kind]

    def shared_out(self, chunks: int) -> ChunkTimes:
        """Return the times of each of so many equal chunks."""
        return ChunkTimes(self.forward / chunks, self.backward / chunks, self.weights / chunks)


@dataclass(frozen=True)
class Table:
    """A schedule.

    Attributes:
        name: a readable name.
        rows: the actions of each rank.
        stages: the stages of each rank, by chunk, counted in forward order.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    stages: tuple[tuple[int, ...], ...]

    @property
    def splits(self) -> bool:
        """Whether weight gradients are separate actions."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def __str__(self) -> str:
        """The actions, one line per rank: ``F0 B0``; chunks after the first are ``F0a``, ``F0b``."""
        return "\n".join(
            f"rank {rank}   {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.rows)
        )


def looped(ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Assign consecutive stages to consecutive ranks, again from the first rank for every further chunk."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def in_a_v(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign stages down the ranks and up again: the first rank has the first and the last stage."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def require_counts(ranks: int, microbatches: int, chunks: Sequence[int] = (1,)) -> None:
    """Check the requirements of every schedule.

    Raises:
        ValueError: there are no ranks, microbatches or chunks.
    """
    if min(ranks, microbatches, *chunks) < 1:
        raise ValueError(
            f"a schedule needs at least one rank, microbatch and chunk, got {ranks}, {microbatches} and "
            f"{min(chunks)}"
        )


def fused(table: Table) -> Table:
    """Merge consecutive stages on one rank in ``table``, because a program passes them at once.

    In a V that concerns the last rank, whose two stages are in the middle of the model. Stages are
    renumbered.
    """
    rows, stages = [], []
    for row, own in zip(table.rows, table.stages, strict=True):
        ends = [chunk for chunk, stage in enumerate(own) if stage + 1 not in own]
        starts = [chunk for chunk, stage in enumerate(own) if stage - 1 not in own]
        new = {"F": starts, "B": ends, "W": ends}
        rows.append(
            tuple(
                action._replace(chunk=new[action.kind].index(action.chunk))
                for action in row
                if action.chunk in new[action.kind]
            )
        )
        stages.append([own[chunk] for chunk in starts])
    remaining = sorted(stage for own in stages for stage in own)
    return Table(table.name, tuple(rows), tuple(tuple(map(remaining.index, own)) for own in stages))
