"""The processes of one case: forked from one that has imported torch, watched, and counted when it is over.

A rank returns from :meth:`Job.fork` in a process of its own, and its interpreter ends as a script's does.
Whatever a rank starts and leaves behind becomes a child of the watching process, which is a subreaper.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch

from tests.faults.campaign.hosts import Hosts
from tests.faults.campaign.records import Board, Fate, Record

__all__ = ["Job", "become_subreaper", "die_with_parent"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TIME_TO_START = 200.0  # until all groups are made, in seconds
TIME_TO_END = 150.0  # after a rank's report, for its process to end
TIME_TO_FOLLOW = 30.0  # after that, for what a rank has started
STACKS = 0.5  # to write them


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_subreaper() -> None:
    """Let orphans of this process's descendants become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Job:
    """The ranks of one case."""

    def __init__(self, ranks: int, hosts: Hosts | None = None) -> None:
        self.ranks = ranks
        self.hosts = hosts
        self.store = hosts.store if hosts else "127.0.0.1"
        self.board = Board()
        # No TemporaryDirectory: ranks whose interpreters end would remove it.
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self._pids: list[int] = []
        self._links: list[Connection] = []
        self._own_link: Connection | None = None
        self._fates = [Fate() for _ in range(ranks)]
        self._reported = [0.0] * ranks
        self._ended = [False] * ranks

    # ---------------------------------------------------------------- in a rank

    def fork(self) -> bool:
        """Start the next rank; True in it, and False in the process that watches."""
        theirs, ours = Pipe(duplex=False)
        rank = len(self._pids)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            theirs.close()
            self._own_link = ours
            self._settle(rank)
            return True
        ours.close()
        self._links.append(theirs)
        self._pids.append(pid)
        return False

    def _settle(self, rank: int) -> None:
        die_with_parent()
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        output = os.open(self._output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        tempfile.tempdir = None
        os.environ.update(
            TMPDIR=str(temporary),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.ranks),
            LOCAL_WORLD_SIZE=str(self.ranks),
        )
        if self.hosts is not None:
            self.hosts.enter(rank, self.ranks)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # After a fork, torch creates its thread pool anew when it is first asked for. If threads of autograd
        # ask at the same time, one of them may find none.
        torch.set_num_threads(1)

    def report(self, run: Callable[[], Record], *, tidy: bool) -> int:
        """Run the rank's side, send its record, and end unless ``tidy``; the exit code of the process."""
        assert self._own_link is not None
        try:
            record = run()
        except BaseException:
            traceback.print_exc()
            return 1
        self._own_link.send_bytes(pickle.dumps(record))
        if not tidy:
            sys.stderr.flush()
            os._exit(0)
        return 0

    # ---------------------------------------------------------------- in the process that watches

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, if its process has not been waited for."""
        if not self._ended[rank]:
            os.kill(self._pids[rank], number)

    def wait_until_ready(self) -> bool:
        """Wait until all ranks' groups are made."""
        deadline = time.monotonic() + TIME_TO_START
        while not self.board.ready(self.ranks):
            self._look()
            if any(self._ended) or time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def wait_for(self, ranks: set[int], deadline: float) -> None:
        """Wait until these ranks have reported or died, or until the deadline on the monotonic clock."""
        while time.monotonic() < deadline:
            self._look()
            if all(self._reported[rank] or self._ended[rank] for rank in ranks):
                return
            open_links = [self._links[rank] for rank in ranks if not self._reported[rank]]
            wait(open_links, timeout=0.02)

    def show_stacks(self, ranks: set[int]) -> None:
        """Let ranks that have not reported write where they are."""
        silent = [rank for rank in ranks if not self._reported[rank] and not self._ended[rank]]
        for rank in silent:
            self.signal(rank, signal.SIGUSR1)
        if silent:
            time.sleep(STACKS)

    def end(self, killed: set[int]) -> list[Fate]:
        """Wait for the ends of all processes, some of which are ``killed``; return what became of them."""
        for rank in killed:
            self.signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + TIME_TO_END
        while not all(self._ended) and time.monotonic() < deadline:
            self._look()
            time.sleep(0.002)
        self.show_stacks(set(range(self.ranks)))
        for rank, fate in enumerate(self._fates):
            fate.output = (
                self._output(rank).read_text(errors="replace") if self._output(rank).exists() else ""
            )
            if not self._ended[rank]:
                self.signal(rank, signal.SIGKILL)
                os.waitpid(self._pids[rank], 0)
                fate.seconds_to_end = TIME_TO_END
        for link in self._links:
            link.close()
        return self._fates

    def _look(self) -> None:
        for rank in range(len(self._pids)):
            self._receive(rank)
            if self._ended[rank]:
                continue
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid == 0:
                continue
            self._receive(rank)
            self._ended[rank] = True
            self._fates[rank].exit_code = os.waitstatus_to_exitcode(status)
            if self._reported[rank]:
                self._fates[rank].seconds_to_end = time.monotonic() - self._reported[rank]

    def _receive(self, rank: int) -> None:
        if self._reported[rank] or self._links[rank].closed:
            return
        try:
            while self._links[rank].poll():
                self._fates[rank].record = pickle.loads(self._links[rank].recv_bytes())
                self._reported[rank] = time.monotonic()
        except EOFError:
            return

    def _output(self, rank: int) -> Path:
        return self.folder / f"output-{rank}"

    def close(self) -> list[str]:
        """Count what is left behind, and take it away."""
        left = [f"a temporary file {path.name}" for path in (self.folder / "tmp").rglob("*")]
        left += [f"a process {name}" for name in _orphans()]
        shutil.rmtree(self.folder)
        return left


def _orphans() -> list[str]:
    """Names of the children that do not end; they are killed."""
    until = time.monotonic() + TIME_TO_FOLLOW
    while (children := _living_children()) and time.monotonic() < until:
        time.sleep(0.01)  # a child of a rank that was killed ends after it
    found = []
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        found.append(f"{pid} ({command.strip()})")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def _living_children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, listed) if os.waitpid(pid, os.WNOHANG)[0] == 0]
