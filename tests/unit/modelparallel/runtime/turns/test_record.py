"""What a rank notes of its step."""

from __future__ import annotations

from opensmd.modelparallel.runtime.turns.record import Record


def test_stretches_follow_one_another_and_count_by_kind() -> None:
    record = Record()
    record.begin(0, "forward")
    record.turn("backward")
    with record.interrupted():
        record.begin(1, "weights")
        record.end()
    record.end()
    stretches = record.stretches
    assert [(stretch.microbatch, stretch.kind) for stretch in stretches] == [
        (0, "forward"),
        (0, "backward"),
        (1, "weights"),
        (0, "backward"),
    ]
    times = [time for stretch in stretches for time in (stretch.start_ns, stretch.end_ns)]
    assert times == sorted(times)
    lengths = [stretch.end_ns - stretch.start_ns for stretch in stretches]
    assert record.spent("backward") == {0: lengths[1] + lengths[3]}
    assert record.spent("weights") == {1: lengths[2]} and record.spent("wait") == {}
