"""``file:///path``: the first process to come serves, and says so in a shared file.

The file is JSON: for each ``group_name``, the server of the job that is gathering. It is only accessed under
an ``fcntl`` lock. The server removes its entry when the rendezvous is over, and the file with the last entry;
an entry whose server has died is replaced by the next process that comes.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opensmd.environment.private_files import open_own
from opensmd.legacy._torch_internals import PrefixStore, Store
from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.host import is_local
from opensmd.legacy.rendezvous.rendezvous import HostLost, Joined, Rendezvous, Surplus
from opensmd.legacy.rendezvous.server import LOOPBACK, Server, address_to_serve, reach_any, serve
from opensmd.legacy.settings import Deadline

__all__ = ["join_file"]

LOCK_INTERVAL = 0.01
RETRY_INTERVAL = 0.05
FORMAT = "opensmd.legacy 1"


def join_file(
    address: Address,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    interface: str | None,
    deadline: Deadline,
) -> Joined:
    """Meet through the file at ``address.path``; ranks that are not given follow from arrival.

    The first process serves on ``interface``; without one, on the loopback if no other host can see the file,
    else on every interface. Until the deadline, a full job is waited for, and one left behind by dead
    processes replaced.

    Raises:
        ValueError: the file contains something else, or its directory is missing.
        RuntimeError: the job cannot start.
    """
    while True:
        try:
            store, entry, serves = _store(address.path, group_name, interface, deadline)
            rendezvous = Rendezvous(
                PrefixStore("opensmd.legacy", store), where=str(address), serves=serves, deadline=deadline
            )
            try:
                return rendezvous.join(rank, world_size)
            finally:
                if serves:
                    _remove(address.path, group_name, entry)
        except (HostLost, Surplus, ConnectionError):
            # An earlier rendezvous about to leave the file, or one whose server died, to be replaced.
            if deadline.passed:
                raise
            time.sleep(RETRY_INTERVAL)


def _store(
    path: str, group_name: str, interface: str | None, deadline: Deadline
) -> tuple[Store, Server, bool]:
    """Return the store of the job under ``group_name``, its entry, and whether this process serves it."""
    with _locked(path, deadline) as file:
        jobs = _read(file, path)
        entry = Server.from_json(jobs[group_name]) if group_name in jobs else None
        if entry is None or entry.process.is_known_dead():
            served_at = LOOPBACK if interface is None and is_local(path) else address_to_serve(interface)
            own = serve(served_at, 0, deadline)
            entry = Server.at(served_at, own.port)
            _write(file, {**jobs, group_name: entry.to_json()})
            return own, entry, True
    try:
        return reach_any(entry, deadline, what=f"the first process of file://{path}"), entry, False
    except ConnectionError:
        _remove(path, group_name, entry)
        raise


def _remove(path: str, group_name: str, entry: Server) -> None:
    """Remove an entry if it is still there, and the file with the last one."""
    with _locked(path, Deadline(10.0)) as file:
        jobs = _read(file, path)
        if jobs.get(group_name) == entry.to_json():
            del jobs[group_name]
        if jobs:
            _write(file, jobs)
        else:
            Path(path).unlink()


@contextmanager
def _locked(path: str, deadline: Deadline) -> Iterator[int]:
    """Open the file, created if needed, under an exclusive lock."""
    while True:
        file = _open(path)
        try:
            _lock(file, path, deadline)
            if _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)  # releases the lock


def _open(path: str) -> int:
    """Open the file, created if needed, but neither through a link nor another user's."""
    try:
        file = open_own(Path(path))
    except OSError as error:
        reason = "it is a link, which is not followed" if Path(path).is_symlink() else error.strerror or error
        raise ValueError(
            f"file://{path}: {reason}; expected the path of a file, which need not exist, in a directory "
            "that all processes can write to"
        ) from error
    status = os.fstat(file)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        os.close(file)
        raise ValueError(
            f"file://{path}: the file belongs to user {status.st_uid}, or all may write to it (mode "
            f"{stat.S_IMODE(status.st_mode):o}): it could lead this process (user {os.geteuid()}) to "
            "somebody else's job. Remove it, or use a path where no file is"
        )
    return file


def _lock(file: int, path: str, deadline: Deadline) -> None:
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if deadline.passed:
                raise RuntimeError(
                    f"file://{path}: another process has held the fcntl lock for {deadline.seconds:g} s; "
                    "end it, or use another file"
                ) from None
            time.sleep(LOCK_INTERVAL)
        except OSError as error:
            raise RuntimeError(
                f"file://{path}: the file system refuses fcntl locks ({error.strerror}); use a local "
                "directory or an NFS mount with locking"
            ) from error


def _is_at(file: int, path: str) -> bool:
    """Whether the file was not removed while we waited for its lock."""
    try:
        there, ours = Path(path).stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _read(file: int, path: str) -> dict[str, str]:
    text = os.pread(file, os.fstat(file).st_size, 0)
    if not text:
        return {}
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError
        return dict(content["jobs"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"file://{path}: the file exists and holds something else; expected a path where no file is: "
            "remove it or use another"
        ) from None


def _write(file: int, jobs: dict[str, str]) -> None:
    text = json.dumps({"format": FORMAT, "jobs": jobs}).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))
