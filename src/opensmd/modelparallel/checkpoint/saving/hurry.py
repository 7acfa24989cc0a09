"""Ranks that wait for a save tell the others, which write more slowly while nobody waits.

Each rank's thread needs those of the others, but a script may wait on one rank alone. One key in the job's
store has the number of the latest save that somebody waits for.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from opensmd.collectives._torch_internals import default_store
from opensmd.collectives.stores.address import where
from opensmd.collectives.stores.deadlines import call_within

__all__ = ["Hurry"]

ANSWER = 1.0  # seconds in which a store answers that works


class Hurry:
    """What ranks tell each other of one save.

    Args:
        group: all ranks; its name is the same on them and no other's.
        number: of the save, among those of the group.
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self._store = default_store() if group.size() > 1 else None  # the group may be gone when it is asked
        self._key, self._number = f"opensmd/saves/{group.group_name}/hurry", str(number)

    def want(self) -> None:
        """Somebody waits on this rank."""
        store = self._store
        if store is not None:
            # Who serves the store may be gone, or stopped while the thread asks it: the save will say so.
            with contextlib.suppress(RuntimeError, TimeoutError):
                call_within(ANSWER, lambda: store.set(self._key, self._number))

    def silence(self) -> str:
        """That the store does not answer, to end a sentence with; empty if it does."""
        store = self._store
        if store is None:
            return ""
        try:
            call_within(ANSWER, lambda: store.check([self._key]))
        except (RuntimeError, TimeoutError):
            return f"; {where(store)}, which rank 0's process or the launcher serves, does not answer"
        return ""

    def is_wanted(self) -> bool:
        """Whether somebody waits on any rank."""
        store = self._store
        if store is None:
            return False
        with contextlib.suppress(RuntimeError):
            return bool(store.check([self._key]) and store.get(self._key) == self._number.encode())
        return False
