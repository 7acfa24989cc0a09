"""Ranks' lines carry their rank and never mix, progress bars included."""

from __future__ import annotations

import io
import os
from pathlib import Path

from opensmd.launch.output.console import Console


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, *writes: tuple[int, bytes]) -> str:
    """What a console shows for these writes of (rank, bytes), each seen before the next is made."""
    console = Console()
    pens = {rank: os.open(console.open(rank, out), os.O_WRONLY) for rank, _ in writes}
    for rank, data in writes:
        os.write(pens[rank], data)
        console._drain()
    console.start()
    console.finish()
    for pen in pens.values():
        os.close(pen)
    return out.getvalue()


def test_every_line_carries_its_rank_and_lines_never_mix() -> None:
    text = shown(io.StringIO(), (0, b"half of "), (1, b"whole\n"), (0, b"a line\nlast"))
    assert text == "[1] whole\n[0] half of a line\n[0] last\n"


def test_the_parts_of_a_very_long_line_follow_each_other_unless_another_rank_writes() -> None:
    part = b"x" * 50_000
    pieces = [(0, part)] * 50
    text = shown(io.StringIO(), *pieces[:25], (1, b"hello\n"), *pieces[25:], (0, b"\n"))
    assert text.replace("\n[1] hello\n[0] ", "") == f"[0] {'x' * 2_500_000}\n"


def test_a_progress_bar_in_a_file_leaves_its_last_state() -> None:
    text = shown(io.StringIO(), (0, b"\r 10%"), (0, b"\r 20%"), (0, b"\r 100%\n"))
    assert text.splitlines()[-1] == "[0]  100%"
    assert len(text.splitlines()) <= 2


def test_progress_bars_of_two_ranks_do_not_write_into_each_other_on_a_terminal() -> None:
    text = shown(Terminal(), (0, b"10%\r20%\r30%"), (1, b"hello\n"), (0, b"\n"))
    plain = text.replace("\x1b[36m", "").replace("\x1b[33m", "").replace("\x1b[0m", "")
    assert plain == "[0] 10%\r\x1b[K[0] 20%\n[1] hello\n[0] 30%\n"


def test_what_a_rank_has_written_to_is_closed_when_it_starts_again() -> None:
    console, out = Console(), io.StringIO()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for attempt in range(3):
        console.end_attempt(0)
        pen = os.open(console.open(0, out), os.O_WRONLY)
        os.write(pen, b"attempt %d" % attempt)
        os.close(pen)
        console._drain()
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2  # both ends of one pipe
    console.start()
    console.finish()
    assert out.getvalue() == "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n"
