"""*Table order*: of everything that can run, what comes first in a rank's row of a schedule's table.

So forwards and backwards alternate as in the table, and a delay holds up only what depends on it. With
backwards that take twice as long as forwards, half of it for weights::

    "interleaved", 3 ranks
    F0 F1 F2 F3 F4 B0 B0 F5 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5
    .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
    .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

Short delays are waited out (:mod:`.patience`), because anything else takes a whole action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from opensmd.modelparallel.planning.policies.policy import Choice, Progress, Standing
from opensmd.modelparallel.planning.schedules.tables import Action

__all__ = ["TableOrder"]

# Enum members are slow to look up
_NEW, _RUNNING, _FORWARD, _AT_FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress
_FORWARDS = (_FORWARD, _AT_FORWARD)


class TableOrder:
    """Of everything that can run, what comes first in this rank's row of a table.

    A forward starts only within the memory bounds: at its place in the row or, if ``early``, as soon as fewer
    microbatches are kept than allowed. What has started is never held up by what has not, and the microbatch
    furthest behind never by bounds, unless pending weight gradients can free memory. So a rank waits only for
    messages, and programs that the row does not foresee also run.

    Args:
        row: the actions of this rank.
        most_active: how many microbatches may be in flight.
        most_kept: for how many, counted once per chunk, activations may be kept until their weight gradients.
        window: how many may be between forward and backward; None for as many as ``most_kept``.
        early: forwards may start before their place in the row, as soon as the row would make the rank wait.
        weights_last: weight gradients wait until nothing else can run, or memory is needed.
        forwards_first: no backward starts before all forwards have ended.
        last_goes_last: the last microbatch's backward comes after all others, because replicas reduce
            gradients in it.
    """

    waits_in_place = False

    def __init__(
        self,
        row: Sequence[Action],
        *,
        most_active: float,
        most_kept: float = math.inf,
        window: int | None = None,
        early: bool = True,
        weights_last: bool = True,
        forwards_first: bool = False,
        last_goes_last: bool = False,
    ) -> None:
        places = _Places.of(tuple(row))
        self.chunks = len(places.forwards)
        self.most_active, self.most_kept, self.window = most_active, most_kept, window
        self.forwards_first = forwards_first
        self._row = row
        self._early, self._weights_last, self._last_goes_last = early, weights_last, last_goes_last
        self._forwards, self._backwards, self._weights = places.forwards, places.backwards, places.weights
        self._choices = places.choices
        self._most_in_flight = most_active if window is None else min(most_active, window)
        self._in_row = not (early or weights_last or forwards_first) and self._most_in_flight == math.inf
        self._done = 0  # the number of completed microbatches at the start
        self._passed = 0  # the number of actions passed in the row
        self._ended = 0  # the number of those that have also ended

    def pick(self, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """See :class:`Policy`."""
        place = self._ended = self._first_left(standing)
        if self._in_row:
            # What comes first in the row can nearly always run, and then the others do not matter.
            choice = self._at_place(place, standing, can_go_on)
            if choice is not None:
                return choice
        choice = self._first_that_can(standing, can_go_on)
        if choice is None or self._early or not self._is_late(place, standing, can_go_on):
            return choice
        return choice._replace(instead_of=self._row[place])

    def _first_that_can(self, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """Return the first in the row of all that can run."""
        progress, _, weights = standing
        in_order, in_flight, kept = self._in_order(standing)
        left, first_weights = self._earliest(weights) if weights else (None, math.inf)
        for place, microbatch in in_order:
            if first_weights < place:
                break
            state = progress[microbatch]
            if state is _NEW:
                idle = not in_flight and not weights
                if idle or (in_flight < self._most_in_flight and self._has_room(place, kept, standing)):
                    return self._choices[microbatch]
            elif state is _AT_FORWARD and self._is_held_up(
                place, kept, standing, furthest_behind=microbatch == self._done
            ):
                continue
            elif can_go_on(microbatch):
                return self._choices[microbatch]
        return None if left is None else Choice(*left)

    def _in_order(self, standing: Standing) -> tuple[list[tuple[int, int]], int, int]:
        """Return what might run, as sorted (place in the row, microbatch); of new microbatches only the next.

        Returns:
            Also how many microbatches are in flight, and for how many, counted once per chunk, activations
            are kept.
        """
        progress, chunks, weights = standing
        first, count, last_chunk = self._done, len(progress), self.chunks - 1
        while first < count and progress[first] is _DONE:
            self._done = first = first + 1
        waiting: list[tuple[int, int]] = []
        kept, fresh, forwards, in_flight = len(weights), -1, 0, 0
        for microbatch in range(first, count):
            state = progress[microbatch]
            if state is _NEW:
                fresh = microbatch  # and all after it are
                break
            if state is _DONE:
                continue
            chunk = chunks[microbatch]
            if chunk > last_chunk:
                chunk = last_chunk
            in_flight += 1
            kept += chunk + 1
            if state is _AT_BACKWARD or state is _BACKWARD:
                waiting.append((self._backwards[chunk][microbatch], microbatch))
                continue
            forwards += 1
            kept -= state is _AT_FORWARD
            waiting.append((self._forwards[chunk][microbatch], microbatch))
        if self.forwards_first and (forwards or fresh >= 0):
            waiting = [entry for entry in waiting if progress[entry[1]] in _FORWARDS]
        if fresh >= 0:
            waiting.append((self._forwards[0][fresh], fresh))
        if len(waiting) > 1:
            waiting.sort()
        return waiting, in_flight, kept

    def _first_left(self, standing: Standing) -> int:
        """Return the place of the row's first action that has not ended, if weight gradients have places."""
        row, place = self._row, self._ended
        progress, chunks, weights = standing
        while place < len(row):
            kind, microbatch, chunk = row[place]
            if kind != "W" or not self._weights_last:
                state, at = progress[microbatch], chunks[microbatch]
                if state is _NEW or (kind == "W" and (microbatch, chunk) in weights):
                    break
                if state in _FORWARDS:
                    # A forward that waits inside has started but not ended.
                    if kind != "F" or at <= chunk:
                        break
                elif kind != "F" and at >= chunk and state is not _DONE:
                    break
            place += 1
        return place

    def _at_place(self, place: int, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """Return the action at that place of the row, if it can run."""
        if place == len(self._row):
            return None
        kind, microbatch, chunk = self._row[place]
        if kind == "W":
            return Choice(microbatch, chunk) if (microbatch, chunk) in standing.weights else None
        if standing.progress[microbatch] is not _NEW and (
            not _is_next(self._row[place], standing) or not can_go_on(microbatch)
        ):
            return None
        return self._choices[microbatch]

    def _is_late(self, place: int, standing: Standing, can_go_on: Callable[[int], bool]) -> bool:
        """Whether the action at that place of the row only waits for a message."""
        if place == len(self._row):
            return False
        action = self._row[place]
        if action.kind == "W" or standing.progress[action.microbatch] is _NEW:
            return False
        return _is_next(action, standing) and not can_go_on(action.microbatch)

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """See :class:`Policy`."""
        if not self._last_goes_last or microbatch != len(progress) - 1:
            return False
        return any(state is not _DONE for state in progress[:-1])

    def _earliest(self, weights: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], float]:
        """Return the weight gradients that come first in the row, and their place, by default its end."""
        if self._weights_last:
            return weights[0], math.inf
        earliest = weights[0] if len(weights) == 1 else min(weights, key=self._place_of_weights)
        return earliest, self._weights.get(earliest, math.inf)

    def _place_of_weights(self, weights: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return self._weights.get(weights, math.inf), weights

    def _has_room(self, place: int, kept: int, standing: Standing) -> bool:
        """Whether a forward may start."""
        return kept < self.most_kept and (self._early or place == self._next_place(standing))

    def _is_held_up(self, place: int, kept: int, standing: Standing, *, furthest_behind: bool) -> bool:
        """Whether a further part of a forward must wait; the one furthest behind waits only for memory."""
        if furthest_behind:
            return bool(standing.weights) and kept >= self.most_kept
        return not self._has_room(place, kept, standing)

    def _next_place(self, standing: Standing) -> int:
        """Return the place of the first action in the row that has not been done."""
        place = self._passed
        while place < len(self._row) and self._is_done(self._row[place], standing):
            place += 1
        self._passed = place
        return place

    def _is_done(self, action: Action, standing: Standing) -> bool:
        progress, chunk = standing.progress[action.microbatch], standing.chunks[action.microbatch]
        if progress is _NEW:
            return False
        if action.kind == "W" and (action.microbatch, action.chunk) in standing.weights:
            return False
        if progress is _DONE:
            return True
        if action.kind == "F":
            return progress not in _FORWARDS or chunk + (progress is _FORWARD) > action.chunk
        return progress not in _FORWARDS and chunk < action.chunk


def _is_next(action: Action, standing: Standing) -> bool:
    """Whether a forward or backward is its microbatch's next; the program may deviate from the table."""
    kind, microbatch, chunk = action
    in_forward = standing.progress[microbatch] in _FORWARDS
    return standing.chunks[microbatch] == chunk and (kind == "F") == in_forward


class _Places(NamedTuple):
    """The places of actions in a row.

    Attributes:
        forwards, backwards: by chunk and microbatch.
        weights: of weight gradients, by (microbatch, chunk), as far as the row has them.
        choices: a Choice per microbatch, created once.
    """

    forwards: Sequence[Sequence[int]]
    backwards: Sequence[Sequence[int]]
    weights: Mapping[tuple[int, int], int]
    choices: Sequence[Choice]

    @staticmethod
    @lru_cache(maxsize=64)  # requested in every step
    def of(row: tuple[Action, ...]) -> _Places:
        """Return the places of the actions in a row."""
        places = {action: place for place, action in enumerate(row)}
        chunks = range(1 + max(action.chunk for action in row))

        def of_kind(kind: str) -> list[list[int]]:
            order = sorted(row, key=lambda action: action.microbatch)
            return [
                [places[action] for action in order if action.kind == kind and action.chunk == chunk]
                for chunk in chunks
            ]

        weights = {
            (action.microbatch, action.chunk): place for action, place in places.items() if action.kind == "W"
        }
        microbatches = range(1 + max(action.microbatch for action in row))
        return _Places(
            of_kind("F"), of_kind("B"), weights, [Choice(microbatch) for microbatch in microbatches]
        )
