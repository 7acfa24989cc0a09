"""Reserving a folder for one job at a time, because two would overwrite each other's files.

The owner holds a kernel lock on a file in the folder, which is released however the process ends. The hosts
of one job may share a folder, because each has its own ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["claim"]


@contextmanager
def claim(option: str, folder: Path, first_rank: int) -> Iterator[None]:
    """Create ``folder`` and keep other jobs out of it until the block ends.

    Args:
        option: the smdrun option that names the folder.
        folder: where this job writes; it need not exist yet.
        first_rank: the lowest rank on this host.

    Raises:
        ValueError: another job writes there, or this job cannot.
    """
    lock = folder / f".{option.strip('-')}-{first_rank}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: cannot make the folder {folder}: {error.strerror}") from error
    try:
        file = _locked(lock)
    except OSError as error:
        raise ValueError(f"{option}: cannot write to the folder {folder}: {error.strerror}") from error
    if file is None:
        raise ValueError(
            f"{option} {folder}: another job{_writer(lock)} writes there, and would write over this one's "
            "files. Give each job a folder of its own."
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # somebody has removed the folder
            lock.unlink()
        file.close()


def _locked(path: Path) -> IO[str] | None:
    """Open and lock the file; return None if another process holds it."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # the file system has no locks, so nobody is kept out
            return file
        if _is_still(path, file):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file
        file.close()


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether ``path`` is still the file that was opened: its previous owner may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _writer(lock: Path) -> str:
    with contextlib.suppress(OSError):
        if pid := lock.read_text():
            return f" (process {pid})"
    return ""
