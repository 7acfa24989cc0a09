"""A rendezvous through a file: who serves, what the file holds meanwhile, and which files are refused."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.file import FORMAT, join_file
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.rendezvous.server import Server
from opensmd.legacy.settings import Deadline
from tests.support.patience import PATIENCE

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def join(path: Path, rank: int = -1, *, group: str = "", seconds: float = PATIENCE) -> Joined:
    return join_file(
        Address("file", path=str(path)),
        rank=rank,
        world_size=1,
        group_name=group,
        interface=None,
        deadline=Deadline(seconds),
    )


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[None]:
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        yield
        holder.kill()


def test_a_job_of_one_leaves_no_file(tmp_path: Path) -> None:
    assert join(tmp_path / "meet").rank == 0
    assert list(tmp_path.iterdir()) == []


def test_a_job_leaves_the_entry_of_another_one_in_the_file(tmp_path: Path) -> None:
    other = Server(Process.this(), 1, ("127.0.0.1",)).to_json()
    content = json.dumps({"format": FORMAT, "jobs": {"other": other}})
    (tmp_path / "meet").write_text(content)
    (tmp_path / "meet").chmod(0o600)
    assert join(tmp_path / "meet", group="mine").rank == 0
    assert json.loads((tmp_path / "meet").read_text()) == json.loads(content)


def test_the_entry_of_a_server_that_has_died_is_replaced(tmp_path: Path) -> None:
    dead = Server(replace(Process.this(), born=1.0), 1, ("127.0.0.1",))
    (tmp_path / "meet").write_text(json.dumps({"format": FORMAT, "jobs": {"": dead.to_json()}}))
    (tmp_path / "meet").chmod(0o600)
    assert join(tmp_path / "meet").rank == 0


@pytest.mark.parametrize("content", ["not ours", '{"format": "other", "jobs": {}}', "[]", '{"jobs": {}}'])
def test_a_file_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"notes\.txt: the file exists and holds something else"):
        join(path)
    assert path.read_text() == content


def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meet").touch()
    (tmp_path / "meet").chmod(0o666)
    with pytest.raises(ValueError, match=r"all may write to it \(mode 666\)"):
        join(tmp_path / "meet")


def test_a_link_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="it is a link, which is not followed"):
        join(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ValueError, match="No such file or directory; expected the path of a file"):
        join(tmp_path / "missing" / "meet")


@pytest.mark.processes
def test_a_lock_that_another_process_keeps_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with (
        locked_by_another_process(tmp_path / "meet"),
        pytest.raises(RuntimeError, match=r"another process has held the fcntl lock for 0\.2 s"),
    ):
        join(tmp_path / "meet", seconds=0.2)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(RuntimeError, match=r"refuses fcntl locks \(No locks available\)"):
        join(tmp_path / "meet")
