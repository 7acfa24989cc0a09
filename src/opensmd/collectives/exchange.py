"""What the members of a group tell each other through its store while the group is made.

All of it ends at the group's timeout, also where the process that serves the store is stopped, and what goes
wrong is said with the ranks of the whole job, whatever their places in the group.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError

from opensmd.collectives.sealed import open_text, seal_text
from opensmd.collectives.stores.address import where
from opensmd.collectives.stores.deadlines import GRACE, call_within

__all__ = ["Exchange"]

LEAST = 1.0  # seconds for every step, though those before it took all the time of a longer timeout
PARTING = 3.0  # seconds that others get to fail when place 0 has

Result = TypeVar("Result")


class Exchange:
    """One member's part in making a group.

    A store may be used again for a group of the same name after ``destroy_process_group``, also of other
    members: arrivals are counted for each set of members, and every complete set opens a generation of keys
    of its own.

    Args:
        store: of this group alone.
        rank: this process's place in the group.
        ranks: the members' ranks in the whole job, by place.
        timeout: that making the group may take.
        group: its name, for error texts.

    Raises:
        DistBackendError: the store does not answer.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], *, timeout: timedelta, group: str
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._timeout, self._group = timeout.total_seconds(), group
        self._end = time.monotonic() + self._timeout
        self._missing: list[int] = []
        self.generation = ""
        members = hashlib.blake2s(repr(list(ranks)).encode(), digest_size=8).hexdigest()

        def arrive() -> int:
            own = _members_key(self.rank)
            store.set(own, seal_text(own, _named(ranks)))  # type: ignore[arg-type]
            return store.add(f"opensmd/arrivals/{members}", 1)

        arrival = self.within("arrival", arrive)
        self.generation = f"{members}/{(arrival - 1) // len(ranks)}"

    @property
    def rank(self) -> int:
        """This process's rank in the whole job."""
        return self._ranks[self._rank]

    def all_gather(self, topic: str, text: str) -> list[str]:
        """Every rank's ``text`` on this topic, by place.

        Raises:
            DistBackendError: a rank did not answer within the group's timeout; the message names it. Or the
                store did not.
        """
        keys = self._keys(topic)

        def gather() -> list[str]:
            self._store.set(keys[self._rank], seal_text(keys[self._rank], text))  # type: ignore[arg-type]
            self._wait(topic, keys)
            return [open_text(key, self._store.get(key)) for key in keys]

        return self.within(topic, gather)

    def close(self, topic: str) -> None:
        """Say that this rank reads the store no more; on place 0, wait until all have said so.

        The process of place 0 often serves the store. Without this its script might end, and the store with
        it, while another rank is still reading what the last :meth:`all_gather` brought.

        Raises:
            DistBackendError: as from :meth:`all_gather`.
        """
        keys = self._keys(topic)

        def leave() -> None:
            self._store.set(keys[self._rank], "")
            if self._rank == 0:
                self._wait(topic, keys)

        self.within(topic, leave)

    def meet(self, topic: str) -> None:
        """Return when all have come here; place 0, whose process often serves the store, as the last one.

        Raises:
            DistBackendError: as from :meth:`all_gather`.
        """
        keys = self._keys(topic)

        def come() -> None:
            self._store.set(keys[self._rank], "")
            self._wait(topic, keys)

        self.within(topic, come)
        self.close(f"{topic}-told")

    def meet_later(self, topic: str) -> None:
        """As :meth:`meet`, when the group was made long ago: the timeout begins now.

        Raises:
            DistBackendError: as from :meth:`all_gather`.
        """
        self._end = time.monotonic() + self._timeout
        self.meet(topic)

    def within(self, topic: str, work: Callable[[], Result]) -> Result:
        """What ``work``, which uses the group's store, returns within the time that is left.

        Raises:
            DistBackendError: the store did not answer, or torch could not do the work.
        """
        try:
            return call_within(self._left() + GRACE, work)
        except TimeoutError:
            raise DistBackendError(
                f"{self._making()}: {where(self._store)} did not answer within {self._timeout:g} s "
                f"({self._at(topic)}). The process that serves it is stopped or cannot be reached: end the "
                "job and start it again."
            ) from None
        except DistBackendError:
            self._part()
            raise
        except RuntimeError as error:
            self._part()
            raise DistBackendError(
                f"{self._making()}: {_first_line(error)} ({self._at(topic)}; {where(self._store)}). If a "
                "process of the job has ended, the cause is in its output."
            ) from error

    def _part(self) -> None:
        """Let place 0, whose process often serves the store, wait a little for others that fail, too.

        Its script will end, and without the store these could not tell what was wrong.
        """
        if not self.generation:
            return
        keys = self._keys("gave up")
        others = [key for place, key in enumerate(keys) if self._ranks[place] not in self._missing]

        def leave() -> None:
            self._store.set(keys[self._rank], "")
            if self._rank == 0:
                self._store.wait(others, timedelta(seconds=PARTING))

        with contextlib.suppress(RuntimeError, TimeoutError):
            call_within(PARTING + GRACE, leave)

    def _left(self) -> float:
        return max(min(LEAST, self._timeout), self._end - time.monotonic())

    def _keys(self, topic: str) -> list[str]:
        return [f"opensmd/{self.generation}/{topic}/{place}" for place in range(len(self._ranks))]

    def _wait(self, topic: str, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._left()))
        except RuntimeError as error:
            missing = [
                rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])
            ]
            if not missing:  # the last one came just now
                return
            self._missing = missing
            raise DistBackendError(
                f"{self._making()}: {_named(missing)} did not join within {self._timeout:g} s "
                f"({self._at(topic)}). {self._other_members(missing)}Look at the output of "
                f"{_named(missing)}, or raise the timeout of init_process_group or new_group."
            ) from error

    def _other_members(self, missing: Sequence[int]) -> str:
        """Which ranks the group has for one of the missing, where it has other ones for this rank."""
        for rank in missing:
            key = _members_key(rank)
            theirs = open_text(key, self._store.get(key)) if self._store.check([key]) else _named(self._ranks)
            if theirs != _named(self._ranks):
                return (
                    f"Rank {rank} makes this group of {theirs}: give all ranks the same world size, and "
                    "new_group the same ranks. "
                )
        return ""

    def _making(self) -> str:
        return f"making group {self._group!r} of {_named(self._ranks)}"

    def _at(self, topic: str) -> str:
        return f"{topic}; this is rank {self.rank}"


def _members_key(rank: int) -> str:
    """Where a rank says which ranks its group has."""
    return f"opensmd/members/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
