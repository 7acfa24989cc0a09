"""How long a table takes and how much each rank keeps, if every action starts as soon as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opensmd.modelparallel.planning.schedules.tables import Action, ChunkTimes, Kind, Table

__all__ = ["Played", "Timed", "play"]

Needs = tuple[Kind, int, int]  # kind, microbatch, stage


class Timed(NamedTuple):
    """An action with its times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A table in time.

    Attributes:
        rows: the actions of each rank.
    """

    rows: tuple[tuple[Timed, ...], ...]

    @property
    def seconds(self) -> float:
        """The time from the first action of all ranks to the last."""
        return max(row[-1].end for row in self.rows)

    @property
    def idle(self) -> list[float]:
        """How long each rank waits between its first action and its last."""
        return [
            row[-1].end - row[0].start - sum(timed.end - timed.start for timed in row) for row in self.rows
        ]

    @property
    def kept(self) -> list[int]:
        """For how many microbatches, counted once per chunk, each rank keeps activations at most.

        They are kept from the start of the forward to the end of the weight gradients, or of a backward that
        includes them.
        """
        return [_most(row) for row in self.rows]

    def chart(self, tick: float = 1.0) -> str:
        """Return a chart with a line per rank and a column per tick; dots are ticks in which a rank waits."""
        width = max(len(str(timed.action)) for row in self.rows for timed in row)
        lines = []
        for row in self.rows:
            cells = ["."] * round(row[-1].end / tick)
            for action, start, end in row:
                first, after = round(start / tick), round(end / tick)
                cells[first:after] = [str(action)] * (after - first)
            lines.append(" ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)


def play(
    table: Table,
    times: Mapping[Kind, float] | Sequence[ChunkTimes],
    sending: float = 0.0,
    delays: Mapping[tuple[int, Action], float] | None = None,
) -> Played:
    """Start every rank's next action as soon as the rank is free and has what the action needs.

    Args:
        times: of one F, B and W of one chunk, or of every stage, in any unit. A B that includes weight
            gradients takes both times.
        sending: how long a tensor is in transit from one rank to another.
        delays: by how much actions of ranks are delayed.

    Raises:
        ValueError: ranks would deadlock, so the table cannot be followed.
    """
    return _Play(table, times, sending, delays or {}).run()


class _Play:
    def __init__(
        self,
        table: Table,
        times: Mapping[Kind, float] | Sequence[ChunkTimes],
        sending: float,
        delays: Mapping[tuple[int, Action], float],
    ) -> None:
        self._table = table
        self._sending = sending
        self._delays = delays
        self._last = max(stage for stages in table.stages for stage in stages)
        if isinstance(times, Mapping):
            times = [ChunkTimes(times["F"], times["B"], times["W"])] * (self._last + 1)
        if not table.splits:
            times = [ChunkTimes(chunk.forward, chunk.backward + chunk.weights, 0.0) for chunk in times]
        self._times = times
        self._rank_of = {stage: rank for rank, stages in enumerate(table.stages) for stage in stages}
        self._ended: dict[Needs, float] = {}

    def run(self) -> Played:
        rows: list[list[Timed]] = [[] for _ in self._table.rows]
        going = True
        while going:
            going = False
            for rank, row in enumerate(self._table.rows):
                while len(rows[rank]) < len(row):
                    timed = self._timed(rank, row[len(rows[rank])], rows[rank])
                    if timed is None:
                        break
                    rows[rank].append(timed)
                    going = True
        self._require_end(rows)
        return Played(tuple(map(tuple, rows)))

    def _timed(self, rank: int, action: Action, before: Sequence[Timed]) -> Timed | None:
        """Return the action with its times; None if what it needs has not been done yet."""
        start = before[-1].end if before else 0.0
        stage = self._table.stages[rank][action.chunk]
        for needs in self._needs(action, stage):
            if needs not in self._ended:
                return None
            other = self._rank_of[needs[2]]
            start = max(start, self._ended[needs] + (self._sending if other != rank else 0.0))
        end = start + self._times[stage].of(action.kind) + self._delays.get((rank, action), 0.0)
        self._ended[action.kind, action.microbatch, stage] = end
        return Timed(action, start, end)

    def _needs(self, action: Action, stage: int) -> list[Needs]:
        kind, microbatch, _ = action
        if kind == "F":
            return [("F", microbatch, stage - 1)] if stage else []
        if kind == "W":
            return [("B", microbatch, stage)]
        after: list[Needs] = [("B", microbatch, stage + 1)] if stage < self._last else []
        return [("F", microbatch, stage), *after]

    def _require_end(self, rows: Sequence[Sequence[Timed]]) -> None:
        stuck = [
            f"rank {rank} at {row[len(done)]}"
            for rank, (row, done) in enumerate(zip(self._table.rows, rows, strict=True))
            if len(done) < len(row)
        ]
        if stuck:
            raise ValueError(f"{self._table.name}: ranks wait for each other ({', '.join(stuck)})")


def _most(row: Sequence[Timed]) -> int:
    splits = any(timed.action.kind == "W" for timed in row)
    now = most = 0
    for timed in row:
        if timed.action.kind == "F":
            now += 1
            most = max(most, now)
        elif timed.action.kind == ("W" if splits else "B"):
            now -= 1
    return most
