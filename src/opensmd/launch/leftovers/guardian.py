"""A process that cleans up after a launcher that was killed.

The kernel ends the ranks when their launcher dies, but not what they have started, and removes no folder. So
the launcher first forks a guardian, in a session of its own, and holds a pipe to it: if the pipe closes
without a word, the launcher is gone. If both are killed at once, the next launcher removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from opensmd.launch.leftovers import open_files, orphans

__all__ = ["Guardian", "job_folder"]

PREFIX = "smdrun-"
MARK = ".job"  # a file in each such folder, because others may use a similar name
YOUNG = 60.0  # seconds for which a folder may belong to a launcher that has not locked it yet
_PIPE = 3  # the guardian's first descriptor after the standard ones
_ALL_IS_WELL = b"."


class Guardian:
    """Watches this process; as a context manager, until its body ends without an exception.

    Args:
        job: the id; every process with it in its environment as :data:`orphans.JOB` belongs to the job.
        folder: removed together with the job.
    """

    def __init__(self, job: str, folder: Path) -> None:
        read, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _guard(read, job, folder)
            finally:
                os._exit(0)
        os.close(read)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with contextlib.suppress(BrokenPipeError):  # somebody has ended the guardian
                os.write(self._pipe, _ALL_IS_WELL)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@contextmanager
def job_folder() -> Iterator[Path]:
    """Create a folder for one job, and remove those that killed launchers have left behind.

    Raises:
        ValueError: there is no place for the folder.
    """
    with ExitStack() as stack:
        try:
            _remove_stale(Path(tempfile.gettempdir()))
            temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
            stack.enter_context(_lock(folder))
            (folder / MARK).touch()
        except OSError as error:
            raise ValueError(
                f"cannot make a temporary folder: {error.strerror}. Set TMPDIR to a folder that can be "
                "written to and has room."
            ) from error
        yield folder


def _guard(pipe: int, job: str, folder: Path) -> None:
    """Run the guardian, which closes everything of the launcher's except the pipe."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(_PIPE):
        os.dup2(nowhere, standard)
    os.dup2(pipe, _PIPE)
    for name in os.listdir(open_files.folder()):  # noqa: PTH208 - names alone
        if int(name) > _PIPE:
            with contextlib.suppress(OSError):  # from listing the folder
                os.close(int(name))
    if os.read(_PIPE, 1) != _ALL_IS_WELL:
        orphans.end_job(job)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove this user's folders of jobs whose launchers are gone, and no others with a similar name."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another launcher is removing it, too
            status = folder.lstat()
            is_old = time.time() - status.st_mtime > YOUNG
            if is_old and status.st_uid == os.geteuid() and (folder / MARK).exists():
                with _lock(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder like a living launcher.

    Raises:
        OSError: another process holds it, or it is not a folder.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
