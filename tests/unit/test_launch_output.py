"""Ranks' output: lines put together, prefixed, and a failure's cause told before its consequences."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from opensmd.launch.output import reports
from opensmd.launch.output.console import Console
from opensmd.launch.output.lines import LineAssembler, Segment
from opensmd.launch.output.reports import Failure, Report
from opensmd.modelparallel.exceptions import PeerFailed


def segments(*chunks: bytes) -> list[tuple[str, str]]:
    lines = LineAssembler()
    found = [(each.text, each.end) for chunk in chunks for each in lines.feed(chunk)]
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


def test_a_progress_bar_in_a_file_leaves_its_last_state() -> None:
    text = shown(io.StringIO(), (0, b"\r 10%"), (0, b"\r 20%"), (0, b"\r 100%\n"))
    assert text.splitlines()[-1] == "[0]  100%"
    assert len(text.splitlines()) <= 2


def test_progress_bars_of_two_ranks_do_not_write_into_each_other_on_a_terminal() -> None:
    text = shown(Terminal(), (0, b"10%\r20%\r30%"), (1, b"hello\n"), (0, b"\n"))
    plain = text.replace("\x1b[36m", "").replace("\x1b[33m", "").replace("\x1b[0m", "")
    assert plain == "[0] 10%\r\x1b[K[0] 20%\n[1] hello\n[0] 30%\n"


def report(rank: int, at: int, *, lost: bool = False, says: str = "an error") -> Report:
    return Report(rank, says, f"Traceback of {rank}", at, lost)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([Failure(0, 1, report(0, 20)), Failure(1, 1, report(1, 10))], 1),
        ([Failure(0, 1, report(0, 10, lost=True)), Failure(1, 1, report(1, 20))], 1),
        ([Failure(0, 1, report(0, 10, lost=True)), Failure(1, -signal.SIGKILL)], 1),
        ([Failure(0, 1, report(0, 10, lost=True)), Failure(1, 7)], 1),
        ([Failure(1, 1, report(1, 10)), Failure(0, -signal.SIGTERM)], 1),
        ([Failure(1, 1, report(1, 10, lost=True)), Failure(0, -signal.SIGTERM)], 1),
        ([Failure(1, -signal.SIGTERM), Failure(0, -signal.SIGTERM)], 1),
        ([Failure(1, -signal.SIGTERM), Failure(0, 1, report(0, 10, lost=True))], 1),
        ([Failure(0, 1, report(0, 9, lost=True, says="rank 1 has died")), Failure(1, -signal.SIGTERM)], 1),
        ([Failure(0, 1, report(0, 9, says="rank 1 has died")), Failure(1, -signal.SIGTERM)], 0),
        ([Failure(0, 1, report(0, 9, lost=True)), Failure(1, 1, report(1, 8, lost=True))], 1),
    ],
)
def test_the_failure_that_the_others_follow_from_is_found(failures: list[Failure], first: int) -> None:
    assert reports.first_failure(failures).rank == first


@pytest.mark.parametrize(
    ("message", "elsewhere"),
    [
        ("DistBackendError: rank 0 on a in barrier(): rank 2 on b has died or cannot be reached", [2]),
        ("DistBackendError: rank 0 on a: rank 2 on b-1 and rank 3 on b-1 have died or cannot", [2, 3]),
        ("DistBackendError: rank 2 on b, rank 3 on b and rank 4 on c have died or cannot", [2, 3, 4]),
        ("DistBackendError: barrier() #3 on rank 0: rank 1 has died", []),
        ("DistBackendError: rank 0 on a in barrier(): timed out; not arrived: rank 2 on b", []),
    ],
)
def test_ranks_of_another_launcher_that_died_are_found_in_what_this_ones_say(
    message: str, elsewhere: list[int]
) -> None:
    failure = Failure(0, 1, Report(0, message, "traceback", 5, of_communication=True))
    assert reports.died_elsewhere(failure, {0: None, 1: None}) == elsewhere


@pytest.mark.parametrize(("code", "status"), [(1, 1), (7, 7), (-9, 137), (-15, 143)])
def test_the_exit_status_is_that_of_a_shell(code: int, status: int) -> None:
    assert reports.exit_status(Failure(0, code)) == status
    assert reports.exit_status(Failure(0, code, report(0, 1))) == 1


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (7, 7), (256 + 3, 3), ("text", 1), (True, 1)])
def test_an_exit_is_reported_with_the_code_python_gives_it(given: Any, code: int, tmp_path: Path) -> None:
    assert reports.code_of(SystemExit(given)) == code
    reports.write(tmp_path / "error.json", SystemExit(given), None, 0)
    found = reports.read(tmp_path / "error.json", 0)
    assert found is not None
    assert (found.exit_code, found.text) == (code, "")


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        raise ConnectionError("Connection closed by peer [127.0.0.1]:1")
    except ConnectionError as error:
        reports.write(path, error, error.__traceback__, 3)
    found = reports.read(path, 3)
    assert found is not None and found.of_communication and found.rank == 3
    assert found.message.startswith("ConnectionError: Connection closed")
    assert "Traceback (most recent call last)" in found.text
    assert [each.name for each in tmp_path.iterdir()] == ["error.json"]
    assert reports.read(tmp_path / "none.json", 0) is None
    reports.write(path, PeerFailed("rank 1 failed: ValueError: boom"), None, 0)
    told = reports.read(path, 0)
    assert told is not None and told.of_communication, "a pipeline that another rank has stopped"


def test_a_consequence_waits_until_its_cause_has_been_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    console = Console()
    for rank in (0, 1):
        console.expect_report(tmp_path / str(rank), rank)
    for rank, error in ((0, RuntimeError("Connection closed by peer")), (1, ValueError("the cause"))):
        reports.write(tmp_path / str(rank), error, None, rank)
        console._look_for_reports()
    time.sleep(1.1)  # longer than a consequence is held back
    console._look_for_reports()
    console.start()
    console.finish()
    assert "the cause" in out.getvalue()
    assert "closed by peer" not in out.getvalue()
