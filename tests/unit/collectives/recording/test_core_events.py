"""What the core notes goes into the timeline with the names that it needs, each once."""

from __future__ import annotations

from opensmd.collectives.recording.core_events import CoreEvents
from opensmd.timeline.frames import CALL, group_frame, lost_frame, operation_frame


class Core:
    """Has noted ``calls``."""

    def __init__(self) -> None:
        self.alarm, self.groups, self.names = -1, 0, ["nothing", "c10d::allreduce_"]
        self.calls, self.lost = b"", 0

    def record_events(self, alarm: int) -> None:
        self.alarm = alarm

    def add_event_group(self, name: str) -> int:
        self.groups += 1
        return self.groups

    def event_operations(self) -> list[str]:
        return self.names

    def take_events(self) -> tuple[bytes, int, int]:
        found = self.calls, self.lost, 5
        self.calls, self.lost = b"", 0
        return found


def test_names_come_once_and_before_the_calls_that_use_them() -> None:
    core = Core()
    events = CoreEvents(core, 17)
    assert core.alarm == 17
    assert events.add_group("pair", [2, 3]) == 1
    core.calls = CALL.pack(1, 2, 3, 4, 1, -1, 1, 0) * 2
    first = list(events())
    named = [group_frame(1, "pair", [2, 3]), operation_frame(0, "nothing"), operation_frame(1, "all_reduce")]
    assert [frame.content for frame in first[:3]] == named
    assert first[3].content.startswith(b"calls\t") and [frame.events for frame in first] == [0, 0, 0, 2]
    assert list(events()) == []
    core.names = [*core.names, "smddp:barrier"]
    core.calls = CALL.pack(1, 2, 3, 4, 1, -1, 2, 0)
    assert next(iter(events())).content == operation_frame(2, "barrier")


def test_what_found_no_room_is_told() -> None:
    core = Core()
    events = CoreEvents(core, 0)
    list(events())
    core.lost = 9
    assert [frame.content for frame in events()] == [lost_frame(9, 5)]
