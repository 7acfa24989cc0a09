"""A folder of results belongs to one running job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opensmd.launch.folder_claim import claim

HOLD = """
import pathlib, sys
from opensmd.launch.folder_claim import claim
with claim("--log-dir", pathlib.Path(sys.argv[1]), 0):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_second_claim_names_the_process_that_holds_the_folder(tmp_path: Path) -> None:
    with (
        claim("--log-dir", tmp_path / "logs", 0),
        pytest.raises(ValueError, match=rf"--log-dir .*logs: another job \(process {os.getpid()}\) writes"),
        claim("--log-dir", tmp_path / "logs", 0),
    ):
        pass


def test_one_job_claims_a_folder_for_two_options_and_for_each_of_its_hosts(tmp_path: Path) -> None:
    with (
        claim("--log-dir", tmp_path, 0),
        claim("--timeline", tmp_path, 0),
        claim("--log-dir", tmp_path, 2),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_free_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with claim("--timeline", tmp_path, 0):
            pass


@pytest.mark.processes
def test_the_folder_is_free_when_its_job_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(ValueError, match=f"process {holder.pid}"), claim("--log-dir", tmp_path, 0):
            pass
        holder.send_signal(signal.SIGKILL)
    with claim("--log-dir", tmp_path, 0):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with (
        pytest.raises(ValueError, match=r"cannot make the folder .*plain/logs: Not a directory"),
        claim("--log-dir", tmp_path / "plain" / "logs", 0),
    ):
        pass
