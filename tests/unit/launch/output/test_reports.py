"""A failure's cause is shown before its consequences, and the launcher ends with its status."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opensmd.launch.output import console as console_module
from opensmd.launch.output import reports
from opensmd.launch.output.console import Console
from opensmd.launch.output.reports import Failure, Report
from opensmd.modelparallel.exceptions import PeerFailed


def report(rank: int, at: int, *, lost: bool = False, says: str = "an error") -> Report:
    return Report(rank, says, f"Traceback of {rank}", at, lost)


EXEC = "rank 1 has died (its process has become another program; its last call was barrier() #1)"


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
        ([Failure(0, 1, report(0, 9, lost=True, says=EXEC)), Failure(1, -signal.SIGTERM)], 0),
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


def test_a_report_names_the_innermost_line_of_the_users_own_code(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    script = tmp_path / "train.py"
    script.write_text("import json\n\ndef step():\n    return json.loads('{')\n")
    names: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["step"]()
    reports.write(path, raised.value, raised.tb, 1)
    found = reports.read(path, 1)
    assert found is not None and found.where == f"{script}:4", "not the line in json"
    reports.write(path, RuntimeError("of nobody's code"), None, 1)
    nowhere = reports.read(path, 1)
    assert nowhere is not None and nowhere.where == ""


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
    assert [one.name for one in tmp_path.iterdir()] == ["error.json"]
    assert reports.read(tmp_path / "none.json", 0) is None
    reports.write(path, PeerFailed("rank 1 failed: ValueError: boom"), None, 0)
    told = reports.read(path, 0)
    assert told is not None and told.of_communication, "a pipeline that another rank has stopped"


def test_a_consequence_waits_until_its_cause_has_been_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    moment = [0.0]
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: moment[0]))
    console = Console()
    for rank in (0, 1):
        console.expect_report(tmp_path / str(rank), rank)
    for rank, error in ((0, RuntimeError("Connection closed by peer")), (1, ValueError("the cause"))):
        reports.write(tmp_path / str(rank), error, None, rank)
        console._look_for_reports()
    moment[0] += 2 * console_module.HOLD
    console._look_for_reports()
    console.start()
    console.finish()
    assert "the cause" in out.getvalue()
    assert "closed by peer" not in out.getvalue()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"message": 7}', '{"message": {"extraInfo": {}}}'])
def test_a_file_that_is_no_report_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(text)
    assert reports.read(tmp_path / "error.json", 0) is None
