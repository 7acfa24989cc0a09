"""Passing the core's records to the timeline: this process's collectives and messages in every group.

The core records them without Python, in a ring (``native/csrc/core/timeline``) that this empties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opensmd.collectives.recording.operation_names import name_of
from opensmd.timeline.frames import CALL, calls_frame, group_frame, lost_frame, operation_frame
from opensmd.timeline.recorder import Frame

__all__ = ["CoreEvents"]


class CoreEvents:
    """What the core records from now on; a source of the recorder.

    Args:
        core: the compiled core.
        alarm: the recorder's.
    """

    def __init__(self, core: Any, alarm: int) -> None:
        self._core = core
        self._groups: list[bytes] = []  # frames not yet written
        self._operations = 0  # how many are written
        core.record_events(alarm)

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Return the number by which the core records calls of a group.

        Args:
            name: torch's name of it.
            ranks: the global ranks, by rank in the group.
        """
        number: int = self._core.add_event_group(name)
        self._groups.append(group_frame(number, name, ranks))
        return number

    def __call__(self) -> Iterator[Frame]:
        """Return what is new."""
        calls, lost, first_lost_ns = self._core.take_events()  # before the groups and operations it refers to
        while self._groups:
            yield Frame(self._groups.pop(0), 0)
        if calls:
            yield from self._new_operations()
            yield Frame(calls_frame(calls), len(calls) // CALL.size)
        if lost:
            yield Frame(lost_frame(lost, first_lost_ns), 0)

    def _new_operations(self) -> Iterator[Frame]:
        operations = self._core.event_operations()
        for number in range(self._operations, len(operations)):
            yield Frame(operation_frame(number, name_of(operations[number])), 0)
        self._operations = len(operations)
