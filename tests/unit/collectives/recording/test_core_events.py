"""What the core notes goes into the timeline with the names that it needs, each once."""

from __future__ import annotations

from opensmd.collectives.recording.core_events import CoreEvents
from opensmd.timeline.lines import CALL


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
    texts = ["group\t1\tpair\t2,3", "operation\t0\tnothing", "operation\t1\tall_reduce"]
    assert [lines.text for lines in first[:3]] == texts
    assert first[3].text.startswith("calls\t") and [lines.events for lines in first] == [0, 0, 0, 2]
    assert list(events()) == []
    core.names = [*core.names, "smddp:barrier"]
    assert [lines.text for lines in events()] == ["operation\t2\tbarrier"]


def test_what_found_no_room_is_told() -> None:
    core = Core()
    events = CoreEvents(core, 0)
    list(events())
    core.lost = 9
    assert [lines.text for lines in events()] == ["lost\t9\t5"]
