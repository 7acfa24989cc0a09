"""A pipeline in one process and in virtual time: real turns over a transport that is a dict.

Every rank has a thread, but only the rank whose clock is furthest behind runs; the others stand still. So
what a rank sees at a time is what the others have sent up to then, and a run is the same each time. A tick
is the time of a forward::

    ranks = play(3, 4)
    print(table(ranks))

    rank 0   F0 F1 F2 F3 .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1   .  F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opensmd.modelparallel.planning.policies.patience import SHARE, Patience
from opensmd.modelparallel.planning.policies.policy import Policy
from opensmd.modelparallel.runtime.messages.message import Message
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.turns.parts import Done, Waiting
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.threads import Threads
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["Pass", "Played", "Rank", "Stage", "draw", "play", "table"]

_FORWARD, _BACKWARD = 0, 1
_NEVER = (float("inf"), 0)


class Played(NamedTuple):
    """What a rank did: ``kind`` is F, B or W (weight gradients); times are in ticks."""

    kind: str
    microbatch: int
    start: int
    end: int


@dataclass
class Stage:
    """How one rank works.

    Attributes:
        policy: who goes on.
        route: the stages that a microbatch passes, in order; this rank may be among them several times.
        forward, backward: ticks of one pass.
        splits_from: microbatches from this one on leave half of their backward for later.
        defers: a backward that waits may run after its function has returned.
        delays: ticks that a microbatch's first forward takes longer.
        lost: what its transport raises where it would wait.
        just_missed: a message comes right after it has first been asked for.
        patience: ticks that it waits for what its table has next.
        first_alone: no other microbatch begins before the first one's forward is complete.
    """

    policy: Policy
    route: Sequence[int]
    forward: int = 1
    backward: int = 2
    splits_from: int | None = None
    defers: bool = True
    delays: dict[int, int] = field(default_factory=dict)
    lost: Exception | None = None
    just_missed: bool = False
    patience: int = 0
    first_alone: bool = False


class _Clocks:
    """Virtual time: of all ranks that can go on, the one that is furthest behind runs.

    A rank's key is (time, phase). At one time, ranks that have just finished something come first (phase 0):
    what they send then has arrived when others ask at that time (phase 1).
    """

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._keys: list[tuple[float, int]] = [(0, 0)] * ranks
        self._arrived: list[dict[Message, int]] = [{} for _ in range(ranks)]
        self._awaited: list[Sequence[Message]] = [()] * ranks
        self.failed = False

    def now(self, rank: int) -> int:
        return int(self._keys[rank][0])

    def go_to(self, rank: int, time: float, phase: int) -> None:
        """Stand still until nobody is behind that time."""
        with self._changed:
            self._keys[rank] = (time, phase)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.failed or self._is_next(rank))
            if self.failed:
                raise RuntimeError("another rank has failed")

    def _is_next(self, rank: int) -> bool:
        return (self._keys[rank], rank) == min((key, other) for other, key in enumerate(self._keys))

    def send(self, rank: int, target: int, tag: int) -> None:
        with self._changed:
            message = (rank, tag)
            self._arrived[target][message] = self.now(rank)
            if message in self._awaited[target]:
                self._awaited[target] = ()
                self._keys[target] = (self.now(rank), 1)

    def has(self, rank: int, message: Message) -> bool:
        self.go_to(rank, self.now(rank), 1)
        return message in self._arrived[rank]

    def wait_any(self, rank: int, messages: Sequence[Message]) -> int:
        self.go_to(rank, self.now(rank), 1)
        with self._changed:
            if not any(message in self._arrived[rank] for message in messages):
                self._awaited[rank] = messages
                self._keys[rank] = _NEVER
                if all(key == _NEVER for key in self._keys):
                    self.failed = True
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self.failed or (not self._awaited[rank] and self._is_next(rank))
                )
                if self.failed:
                    raise RuntimeError(f"rank {rank} waits for {messages}, which nobody sends")
        return next(n for n, message in enumerate(messages) if message in self._arrived[rank])

    def end(self, rank: int, *, well: bool) -> None:
        with self._changed:
            self._keys[rank] = _NEVER
            self.failed = self.failed or not well
            self._changed.notify_all()


class Rank:
    """One rank: its turns, the transport that they ask, the weight gradients that fill in."""

    def __init__(self, clocks: _Clocks, rank: int, stage: Stage, microbatches: int) -> None:
        self.stage = stage
        self.rank = rank
        self.played: list[Played] = []
        self.threads: set[int] = set()
        self.error: BaseException | None = None
        self._clocks = clocks
        self._missed: set[Message] = set()
        self.left: list[tuple[int, int]] = []
        self.watches_first = stage.first_alone
        self.microbatches = [Microbatch(index) for index in range(microbatches)]
        self.patience = Patience(stage.patience / SHARE)
        self.turns = Turns(
            self.microbatches,
            policy=stage.policy,
            arrivals=self,
            weight_work=self,
            record=Record(),
            threads=Threads(),
            swapped_state=self,
            patience=self.patience,
        )

    def play(self, function: Callable[[Pass], None]) -> None:
        self._clocks.go_to(self.rank, 0, 0)
        try:
            self.turns.run([Pass(self, microbatch, function) for microbatch in self.microbatches])
            while self.left:
                self.run(*self.left[0])
        except BaseException as error:
            self.error = error
        self._clocks.end(self.rank, well=self.error is None)

    # --- the transport ---------------------------------------------------------------------------------

    def ready(self, message: Message) -> bool:
        has_come = self._clocks.has(self.rank, message)
        if has_come and self.stage.just_missed and message not in self._missed:
            self._missed.add(message)
            return False
        return has_come

    def wait_any(self, messages: Sequence[Message]) -> int:
        if self.stage.lost is not None:
            raise self.stage.lost
        return self._clocks.wait_any(self.rank, messages)

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        if self.stage.lost is not None:
            raise self.stage.lost
        end = self._clocks.now(self.rank) + seconds
        while not any(map(self.ready, messages)):
            if self._clocks.now(self.rank) >= end:
                return False
            self._clocks.go_to(self.rank, self._clocks.now(self.rank) + 1, 0)
        return True

    def send(self, target: int, tag: int) -> None:
        self._clocks.send(self.rank, target, tag)

    # --- work ------------------------------------------------------------------------------------------

    def work(self, kind: str, microbatch: int, ticks: int) -> None:
        self.threads.add(threading.get_ident())
        start = self._clocks.now(self.rank)
        self.played.append(Played(kind, microbatch, start, start + ticks))
        self._clocks.go_to(self.rank, start + ticks, 0)

    def run(self, microbatch: int, chunk: int) -> None:
        self.left.remove((microbatch, chunk))
        self.work("W", microbatch, self.stage.backward // 2)

    # --- what microbatches have to themselves: nothing ---------------------------------------------------

    def watch_first(self) -> None:
        """Nothing."""

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """Nothing."""

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """Nothing."""

    def resume(self, microbatch: int) -> None:
        """Nothing."""

    def end(self, microbatch: int, *, backward_left: bool) -> None:
        """Nothing."""


class Pass:
    """One microbatch on one rank, which does what the runtime does around the user's function."""

    def __init__(self, rank: Rank, microbatch: Microbatch, function: Callable[[Pass], None]) -> None:
        self.rank = rank
        self.microbatch = microbatch
        self.index = microbatch.index
        self._function = function
        self._left: list[int] = []
        self._course = self._run()

    def advance(self) -> Waiting | Done:
        return next(self._course, Done())

    def _run(self) -> Iterator[Waiting]:
        self._function(self)
        while self._left:
            leg, self._left = self._next_leg(self._left)
            yield Waiting(self._awaited(leg))
            self._run_backward(leg)

    def forward(self) -> None:
        """Pass all stages of the route; this rank works on its own."""
        stage, route = self.rank.stage, self.rank.stage.route
        for place, home in enumerate(route):
            if home != self.rank.rank:
                continue
            if place and route[place - 1] != home:
                if place > route.index(home) and self.rank.turns.chunked:
                    self.microbatch.chunk += 1
                    self.rank.turns.before_chunk(self.microbatch, self._messages(place, _FORWARD))
                self._wait(self._messages(place, _FORWARD))
            ticks = stage.forward + (stage.delays.get(self.index, 0) if place == route.index(home) else 0)
            self.rank.work("F", self.index, ticks)
            if place + 1 < len(route) and route[place + 1] != home:
                self.rank.send(route[place + 1], self._tag(place + 1, _FORWARD))

    def backward(self) -> None:
        """Begin the backward, which may be deferred."""
        self.rank.turns.at_backward(self.microbatch)
        places = [place for place, home in enumerate(self.rank.stage.route) if home == self.rank.rank]
        places.reverse()
        leg, rest = self._next_leg(places)
        if not self.rank.stage.defers:
            self.rank.turns.before_backward(self.microbatch, self._awaited(leg))
        elif not self.rank.turns.is_first(self.microbatch, self._awaited(leg)):
            self._left = places
            return
        self._run_backward(leg)
        self._left = rest

    def _next_leg(self, places: list[int]) -> tuple[list[int], list[int]]:
        """What a backward goes through before it may give way, and what comes after."""
        return (places[:1], places[1:]) if self.rank.turns.chunked else (places, [])

    def _run_backward(self, places: list[int]) -> None:
        stage, route = self.rank.stage, self.rank.stage.route
        splits = stage.splits_from is not None and self.index >= stage.splits_from
        for place in places:
            if place + 1 < len(route):
                self._wait(self._messages(place, _BACKWARD))
            self.rank.work("B", self.index, stage.backward // 2 if splits else stage.backward)
            if splits:
                self.rank.left.append((self.index, self.microbatch.chunk))
            if place:
                self.rank.send(route[place - 1], self._tag(place - 1, _BACKWARD))
        self.microbatch.chunk = max(self.microbatch.chunk - 1, 0)

    def _awaited(self, places: list[int]) -> list[Message]:
        last = places[0] + 1 == len(self.rank.stage.route)
        return [] if last else self._messages(places[0], _BACKWARD)

    def _messages(self, place: int, kind: int) -> list[Message]:
        source = self.rank.stage.route[place - 1 if kind == _FORWARD else place + 1]
        return [(source, self._tag(place, kind))]

    def _tag(self, place: int, kind: int) -> int:
        return (self.index * 100 + place) * 2 + kind

    def _wait(self, messages: list[Message]) -> None:
        """As transfers do."""
        if not self.rank.ready(messages[0]):
            self.rank.turns.wait(self.microbatch, messages)


def _forward_and_backward(microbatch: Pass) -> None:
    microbatch.forward()
    microbatch.backward()


def play(
    stages: Sequence[Stage], microbatches: int, function: Callable[[Pass], None] = _forward_and_backward
) -> list[Rank]:
    """Run a step of ``function`` on all ranks; what it raises stays with its rank."""
    clocks = _Clocks(len(stages))
    ranks = [Rank(clocks, rank, stage, microbatches) for rank, stage in enumerate(stages)]
    threads = [threading.Thread(target=rank.play, args=(function,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), table(ranks)
    return ranks


def table(ranks: Sequence[Rank]) -> str:
    """What each rank did in which tick; see :func:`draw`."""
    return draw([rank.played for rank in ranks])


def draw(rows: Sequence[Sequence[Played]]) -> str:
    """What each rank did in which tick: ``F0`` for the forward of microbatch 0, a dot for none."""
    lines = []
    for rank, row in enumerate(rows):
        ticks = ["."] * max((played.end for played in row), default=0)
        for kind, microbatch, start, end in row:
            ticks[start:end] = [f"{kind}{microbatch}"] * (end - start)
        lines.append(f"rank {rank}   " + " ".join(f"{tick:<2}" for tick in ticks).rstrip())
    return "\n".join(lines)
