"""What is written of a step and of calls is read again; of a frame that is not whole, nothing."""

from __future__ import annotations

import pytest

from opensmd.timeline.frames import (
    CUT,
    NOTHING_EXPECTED,
    calls_frame,
    frames,
    group_frame,
    step_frame,
    stretches_of,
)

STRETCHES = [(0, "forward", 10**15, 10**15 + 7), (-1, "wait", 10**15 + 7, 10**15 + 9), (0, "weights", 1, 2)]


def test_data_may_hold_any_bytes_and_words_any_language() -> None:
    written = [calls_frame(b"a\n\tb\0" * 9), group_frame(3, "größe", [1, 2]), CUT]
    read = list(frames(b"".join(written)))
    assert read == [(["calls"], b"a\n\tb\0" * 9), (["group", "3", "größe", "1,2"], b""), (["cut"], b"")]


@pytest.mark.parametrize("count", range(4))
def test_stretches_are_read_as_they_were(count: int) -> None:
    ((words, data),) = frames(step_frame(NOTHING_EXPECTED, STRETCHES[:count]))
    assert words == ["step", "-1"]
    assert list(stretches_of(data)) == STRETCHES[:count]


def test_wherever_a_killed_rank_stopped_whole_frames_remain() -> None:
    whole = step_frame(0, STRETCHES)
    for length in range(len(whole)):
        assert len(list(frames(whole + whole[:length]))) == 1


def test_other_contents_are_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(frames(b"something else\n"))
