"""The rendezvous of a job's processes in a store: arrival indices, ranks, and one verdict for all.

1. Each process takes the next arrival index (an atomic counter) and leaves its :class:`~.roster.Member`.
2. The first ``world_size`` arrivals are the job; ranks follow from them by a pure function. Later ones are
   told that the job is full.
3. Each of them reports ready; the last one completes the rendezvous. So nobody leaves before all have read
   it.
4. Whoever notices a problem (two world sizes, a rank taken twice, a dead process, a timeout) writes the
   reason once; all others find it there and raise the same error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import DistError

from opensmd.legacy._torch_internals import Store
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.roster import Member, assign_ranks, contradiction, missing_ranks
from opensmd.legacy.settings import Deadline

__all__ = ["HostLost", "Joined", "Rendezvous", "Surplus"]

POLL_FIRST, POLL_LONGEST = 0.002, 0.05
LIVENESS_INTERVAL = 0.5
LINGER = 5.0  # seconds; on a busy machine, processes were seen to be delayed by more than two


class Surplus(RuntimeError):
    """The job already has all its processes."""


class HostLost(RuntimeError):
    """The process that serves the store is gone."""


@dataclass(frozen=True)
class Joined:
    """The outcome of a rendezvous: the store, this process's rank, and every process by rank."""

    store: Store
    rank: int
    processes: tuple[Process, ...]
    serves: bool

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.processes)

    @property
    def one_network(self) -> bool:
        """Whether all processes share a loopback."""
        return len({process.net_space for process in self.processes}) == 1


class Rendezvous:
    """One process's view of a rendezvous in ``store``.

    Args:
        store: one that all processes of the job reach, and no other job's.
        where: the init method, for error messages.
        serves: whether this process serves the store.
        deadline: when to give up.
    """

    def __init__(self, store: Store, *, where: str, serves: bool, deadline: Deadline) -> None:
        self._store = store
        self._where = where
        self._serves = serves
        self._deadline = deadline
        self._next_liveness_check = 0.0

    def join(self, rank: int, world_size: int) -> Joined:
        """Take part; block until all processes have.

        Args:
            rank: the wanted rank, or -1.
            world_size: how many processes there will be.

        Raises:
            Surplus: the job was complete before this process came.
            HostLost: the store went away.
            RuntimeError: the reason why the job cannot start, the same on every rank.
        """
        try:
            return self._join(Member(Process.this(), rank, world_size))
        except DistError as error:
            raise HostLost(
                f"{self._where}: the process that serves the rendezvous has ended before all had joined; "
                "start all processes again"
            ) from error

    def _join(self, me: Member) -> Joined:
        index = self._store.add("arrivals", 1) - 1
        self._store.set(f"arrival/{index}", me.to_json())
        if index >= me.world_size:
            self._judge_the_late(index, me)
        members = self._gather(me.world_size)
        ranks = assign_ranks(members)
        self._confirm(members)
        by_rank = sorted(zip(ranks, members, strict=True), key=lambda pair: pair[0])
        return Joined(
            self._store, ranks[index], tuple(member.process for _, member in by_rank), serves=self._serves
        )

    def _gather(self, world_size: int) -> list[Member]:
        """Wait until all have arrived."""
        members: list[Member] = []
        for _ in self._poll():
            members += self._arrived(len(members), world_size)
            reason = contradiction(members)
            if reason:
                self._fail(reason)
            if len(members) == world_size:
                break
            self._check_alive(members)
        else:
            self._fail_for_missing(members, world_size)
        return members

    def _fail_for_missing(self, members: list[Member], world_size: int) -> NoReturn:
        came = ", ".join(map(str, members))
        self._fail(
            f"waited {self._deadline.seconds:g} s for {world_size} processes and {len(members)} came "
            f"({came}); missing: {missing_ranks(members, world_size)}; start what is missing, check that "
            "all were given the same address and world_size, or raise OPENSMD_LEGACY_TIMEOUT"
        )

    def _arrived(self, start: int, world_size: int) -> list[Member]:
        """Return the members from arrival index ``start`` up to the first missing one."""
        members = []
        for index in range(start, world_size):
            if not self._store.check([f"arrival/{index}"]):
                break
            members.append(Member.from_json(self._store.get(f"arrival/{index}")))
        return members

    def _confirm(self, members: list[Member]) -> None:
        """Report ready and wait until all others have."""
        if self._store.add("ready", 1) == len(members):
            self._store.set("complete", "1")
            return
        for _ in self._poll():
            if self._store.check(["complete"]):
                return
            self._check_alive(members)
        ready = self._store.add("ready", 0)
        self._fail(
            f"all {len(members)} processes came, but only {ready} went on; one of them may have stopped"
        )

    def _judge_the_late(self, index: int, me: Member) -> NoReturn:
        """Tell a late process why it is too late: the job's failure, or that it is full."""
        members = self._arrived(0, me.world_size)
        disagreement = any(member.world_size != me.world_size for member in members)
        for _ in self._poll():
            if self._store.check(["complete"]):
                break
        if disagreement:
            raise RuntimeError(f"{self._where}: {contradiction([*members, me])}")
        raise Surplus(
            f"{self._where}: this is process number {index + 1} of a job of {me.world_size}, which already "
            f"has: {', '.join(map(str, members))}; end the other job, or use another address or group_name"
        )

    def _poll(self) -> Iterator[None]:
        """Yield at growing intervals until the deadline; raise the job's failure as soon as there is one."""
        pause = POLL_FIRST
        while True:
            if self._store.check(["failure"]):
                self._raise_failure()
            yield
            if self._deadline.passed:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_LONGEST)

    def _check_alive(self, members: list[Member]) -> None:
        if time.monotonic() < self._next_liveness_check:
            return
        self._next_liveness_check = time.monotonic() + LIVENESS_INTERVAL
        for member in members:
            if member.process.is_known_dead():
                self._fail(f"{member} ended before all processes had joined; start all processes again")

    def _fail(self, reason: str) -> NoReturn:
        """Make ``reason`` the job's failure, unless it already has one, and raise it."""
        self._store.compare_set("failure", "", reason)
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        reason = self._store.get("failure").decode()
        heard = self._store.add("heard", 1)
        if self._serves:
            self._linger(heard)
        raise RuntimeError(f"{self._where}: {reason}")

    def _linger(self, heard: int) -> None:
        """Keep serving the reason to the others before this process may end."""
        until = time.monotonic() + LINGER
        while heard < self._store.add("arrivals", 0) and time.monotonic() < until:
            time.sleep(POLL_FIRST)
            heard = self._store.add("heard", 0)
