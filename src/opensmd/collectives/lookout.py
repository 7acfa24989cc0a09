"""Why a group cannot come about, which one member knows and all must hear: they would wait for their timeout.

A member that fails says so in the group's store. Others look there while they wait long, and at the ranks of
their host that smdrun has started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from opensmd.collectives.sealed import open_text, seal_text

__all__ = ["GIVEN_UP", "Lookout", "tell_failure", "told_failure"]

GIVEN_UP = "\0"  # in place of what a member has not said, for those who wait for it


class Lookout:
    """One member's look at how the others are, again and again while it waits.

    It has a client of the store of its own, because the waiting one is locked.

    Args:
        store: the group's.
        key: under which a member says why it has failed.
        awaited: the keys that this member waits for.
        never_come: takes the missing ones, and returns why some will never be set; empty if all may.
    """

    def __init__(
        self, store: Store, key: str, awaited: Sequence[str], never_come: Callable[[Sequence[str]], str]
    ) -> None:
        self._store, self._key = store, key
        self._awaited, self._never_come = awaited, never_come
        self._own: Any = None

    @property
    def client(self) -> Store:
        """The client that this looks with, or the group's if it has not looked yet."""
        return self._own or self._store

    def look(self) -> str:
        """Return why the group cannot come about; empty if it may.

        The awaited keys are then set, so that nothing waits for them any more.
        """
        why = ""
        with contextlib.suppress(RuntimeError):  # the store has its own time limit
            self._own = self._own or _another_client(self._store)
            why = self._found(self._own)
            for key in self._missing(self._own) if why else ():
                self._own.set(key, seal_text(key, GIVEN_UP))
        return why

    def _found(self, store: Store) -> str:
        if told := told_failure(store, self._key):
            return told
        why = self._never_come(self._missing(store))
        if why:  # but they may have come in the moment before they ended
            why = self._never_come(self._missing(store))
        if why:
            tell_failure(store, self._key, why)
        return why

    def _missing(self, store: Store) -> list[str]:
        return [key for key in self._awaited if not store.check([key])]


def tell_failure(store: Store, key: str, why: str) -> None:
    """Let all members know why the group cannot come about; the first reason counts."""
    store.compare_set(key, "", seal_text(key, why))  # type: ignore[arg-type]


def told_failure(store: Store, key: str) -> str:
    """Return what :func:`tell_failure` has told; empty if nothing."""
    return open_text(key, store.get(key)) if store.check([key]) else ""


def _another_client(store: Any) -> Any:
    """Return a client of the same store that does not wait for calls of ``store``, if there can be one."""
    try:
        return store.clone()  # torch does not declare it
    except RuntimeError:
        return store
