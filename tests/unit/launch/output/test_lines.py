"""Lines are put together from ranks' bytes, however these arrive."""

from __future__ import annotations

import pytest

from opensmd.launch.output.lines import LONGEST, LineAssembler, Segment


def segments(*chunks: bytes) -> list[tuple[str, str]]:
    lines = LineAssembler()
    found = [(one.text, one.end) for chunk in chunks for one in lines.feed(chunk)]
    return [*found, (lines.take_rest().text, "")] if lines.waiting else found


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((b"one\ntwo\n",), [("one", "\n"), ("two", "\n")]),
        ((b"on", b"e\n"), [("one", "\n")]),
        ((b"a\r", b"\nb\n"), [("a", "\n"), ("b", "\n")]),
        ((b"10%\r20%\r100%\n",), [("10%", "\r"), ("20%", "\r"), ("100%", "\n")]),
        ((b"\xc3", b"\xa9\n"), [("é", "\n")]),
        ((b"\xff\n",), [("\udcff", "\n")]),
        ((b"rest",), [("rest", "")]),
        ((), []),
    ],
)
def test_bytes_become_whole_lines_however_they_arrive(
    chunks: tuple[bytes, ...], expected: list[tuple[str, str]]
) -> None:
    assert segments(*chunks) == expected


def test_taking_the_rest_empties_it() -> None:
    lines = LineAssembler()
    lines.feed(b"half")
    assert lines.take_rest() == Segment("half", "")
    assert not lines.waiting


def test_no_more_of_a_line_is_held_than_anybody_reads() -> None:
    piece = "x" * 100_000
    lines = LineAssembler()
    found = [one for _ in range(25) for one in lines.feed(piece.encode())]
    assert [one.end for one in found] == ["", ""]
    assert all(len(one.text) <= LONGEST + len(piece) for one in found)
    assert lines.feed(b"y\n") == [Segment((25 * piece)[sum(len(one.text) for one in found) :] + "y", "\n")]
