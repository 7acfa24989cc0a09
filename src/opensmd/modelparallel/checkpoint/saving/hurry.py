"""Telling other ranks that somebody waits for a save; while nobody does, they write more slowly.

Each rank's thread depends on those of the others, but a script may wait on one rank alone. A key in the job's
store holds the number of the latest save that somebody waits for.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from opensmd.collectives._torch_internals import default_store
from opensmd.collectives.stores.address import where
from opensmd.collectives.stores.deadlines import call_within

__all__ = ["Hurry"]

ANSWER = 1.0  # seconds within which a working store answers


class Hurry:
    """What ranks tell each other about one save.

    Args:
        group: all ranks; its name is unique, and the same on all of them.
        number: of the save, among those of the group.
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self._store = default_store() if group.size() > 1 else None  # the group may be gone later
        self._key, self._number = f"opensmd/saves/{group.group_name}/hurry", str(number)

    def want(self) -> None:
        """Tell the other ranks that somebody waits on this one."""
        store = self._store
        if store is not None:
            # The store's server may be gone, or stop in the middle of a request: the save will say so.
            with contextlib.suppress(RuntimeError, TimeoutError):
                call_within(ANSWER, lambda: store.set(self._key, self._number))

    def silence(self) -> str:
        """Return a clause saying that the store does not answer, to end a sentence with; empty if it does."""
        store = self._store
        if store is None:
            return ""
        try:
            call_within(ANSWER, lambda: store.check([self._key]))
        except (RuntimeError, TimeoutError):
            return f"; {where(store)}, which rank 0's process or the launcher serves, does not answer"
        return ""

    def is_wanted(self) -> bool:
        """Whether somebody is waiting on any rank."""
        store = self._store
        if store is None:
            return False
        with contextlib.suppress(RuntimeError):
            return bool(store.check([self._key]) and store.get(self._key) == self._number.encode())
        return False
