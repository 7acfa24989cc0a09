"""What the members of a group tell each other through its store while the group is created.

All of it ends at the group's timeout, even if the process that serves the store is stopped, and errors name
ranks of the whole job, whatever their positions in the group.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError, get_world_size, is_initialized

from opensmd.collectives._torch_internals import lost_ranks
from opensmd.collectives.lookout import GIVEN_UP, Lookout, tell_failure, told_failure
from opensmd.collectives.sealed import open_text, seal_text
from opensmd.collectives.stores.address import where
from opensmd.collectives.stores.deadlines import GRACE, call_within
from opensmd.environment.siblings import ended_siblings
from opensmd.first_line import first_line

__all__ = ["Exchange"]

LEAST = 1.0  # seconds for every step, even if earlier ones have used up a longer timeout
PARTING = 3.0  # seconds for others to fail after position 0 has

Result = TypeVar("Result")


class Exchange:
    """One member's part in creating a group.

    A store may be reused for a group of the same name after ``destroy_process_group``, even with other
    members: arrivals are counted per set of members, and every complete set starts a new generation of keys.

    Args:
        store: of this group alone.
        rank: this process's position in the group.
        ranks: the members' ranks in the whole job, by position.
        timeout: for creating the group.
        group: its name, for error messages.

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
        self._free = store  # a client in which nothing waits
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
        """Return every rank's ``text`` on this topic, by position.

        Raises:
            DistBackendError: a rank did not answer within the group's timeout, and the message names it; or
                the store did not.
        """
        keys = self._keys(topic)

        def gather() -> list[str]:
            self._store.set(keys[self._rank], seal_text(keys[self._rank], text))  # type: ignore[arg-type]
            self._wait(topic, keys)
            texts = [open_text(key, self._store.get(key)) for key in keys]
            if GIVEN_UP in texts:
                raise DistBackendError(self._in_vain(told_failure(self._store, self._failed)))
            return texts

        return self.within(topic, gather, keys)

    def close(self, topic: str) -> None:
        """Say that this rank no longer reads the store; on position 0, wait until all have said so.

        The process of position 0 often serves the store. Otherwise its script might end, and the store with
        it, while another rank is still reading the result of the last :meth:`all_gather`.

        Raises:
            DistBackendError: as in :meth:`all_gather`.
        """
        keys = self._keys(topic)

        def leave() -> None:
            self._store.set(keys[self._rank], "")
            if self._rank == 0:
                self._wait(topic, keys)

        self.within(topic, leave, keys)

    def meet(self, topic: str) -> None:
        """Wait until all have called this; position 0, whose process often serves the store, returns last.

        Raises:
            DistBackendError: as in :meth:`all_gather`.
        """
        keys = self._keys(topic)

        def come() -> None:
            self._store.set(keys[self._rank], "")
            self._wait(topic, keys)

        self.within(topic, come, keys)
        self.close(f"{topic}-told")

    def meet_later(self, topic: str) -> None:
        """Like :meth:`meet`, for a group created long ago: the timeout starts now.

        Raises:
            DistBackendError: as in :meth:`all_gather`.
        """
        self._end = time.monotonic() + self._timeout
        self.meet(topic)

    def within(self, topic: str, work: Callable[[], Result], awaited: Sequence[str] = ()) -> Result:
        """Return the result of ``work`` within the remaining time.

        Args:
            topic: what it is, for messages.
            work: uses the group's store.
            awaited: the keys that it waits for.

        Raises:
            DistBackendError: the store did not answer, torch could not do the work, or another member failed
                meanwhile.
        """
        try:
            return call_within(self._left() + GRACE, work, self._lookout(awaited))
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
            self._part(f"rank {self.rank} failed: {first_line(error)} ({topic})")
            raise DistBackendError(
                f"{self._making()}: {first_line(error)} ({self._at(topic)}; {where(self._store)}). If a "
                "process of the job has ended, the cause is in its output."
            ) from error

    def _lookout(self, awaited: Sequence[str]) -> Callable[[], None] | None:
        """Return what raises when waiting is in vain; None before members know their generation."""
        if not self.generation:
            return None
        lookout = Lookout(self._store, self._failed, awaited, self._never_come)

        def look() -> None:
            if why := lookout.look():
                self._free = lookout.client
                raise DistBackendError(self._in_vain(why))

        return look

    def _never_come(self, missing: Sequence[str]) -> str:
        """Return why keys will never be set: ranks that should have set them are lost."""
        lost = self._lost([self._ranks[int(key.rpartition("/")[2])] for key in missing])
        return ", ".join(f"rank {rank} will not join ({what})" for rank, what in lost.items())

    def _lost(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return those of ``ranks`` that have certainly ended, or left the default group, and which of it."""
        world_size = get_world_size() if is_initialized() else len(self._ranks)
        lost = lost_ranks()
        lost |= dict.fromkeys(ended_siblings(ranks, self.rank, world_size), "its process has died")
        return {rank: lost[rank] for rank in ranks if rank in lost}

    def _in_vain(self, why: str) -> str:
        return f"{self._making()}: {why}. This is rank {self.rank}."

    def _part(self, why: str = "") -> None:
        """Say why this rank has failed, if the others cannot know.

        Position 0, whose process often serves the store, then waits briefly for others that fail, too: its
        script will end, and without the store the others could not say what was wrong.
        """
        if not self.generation:
            return
        keys = self._keys("gave up")
        gone = {*self._missing, *self._lost(self._ranks)}
        others = [key for place, key in enumerate(keys) if self._ranks[place] not in gone]

        def leave() -> None:
            if why:
                tell_failure(self._free, self._failed, why)
            self._free.set(keys[self._rank], "")
            if self._rank == 0:
                self._free.wait(others, timedelta(seconds=PARTING))

        with contextlib.suppress(RuntimeError, TimeoutError):
            call_within(PARTING + GRACE, leave)

    def _left(self) -> float:
        return max(min(LEAST, self._timeout), self._end - time.monotonic())

    @property
    def _failed(self) -> str:
        return f"opensmd/{self.generation}/failed"

    def _keys(self, topic: str) -> list[str]:
        return [f"opensmd/{self.generation}/{topic}/{place}" for place in range(len(self._ranks))]

    def _wait(self, topic: str, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._left()))
        except RuntimeError as error:
            missing = [
                rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])
            ]
            if not missing:  # the last one has just come
                return
            self._missing = missing
            raise DistBackendError(
                f"{self._making()}: {_named(missing)} did not join within {self._timeout:g} s "
                f"({self._at(topic)}). {self._other_members(missing)}Look at the output of "
                f"{_named(missing)}, or raise the timeout of init_process_group or new_group."
            ) from error

    def _other_members(self, missing: Sequence[int]) -> str:
        """Return the ranks that one of the missing has for the group, if they differ from this rank's."""
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
    """Return the key under which a rank says which ranks its group has."""
    return f"opensmd/members/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
