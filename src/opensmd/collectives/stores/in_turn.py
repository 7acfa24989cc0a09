"""Consecutive stores at one address: an early rank must not meet the store that is about to close.

If no launcher serves a store, rank 0 of each default group does, at a common address. After
``destroy_process_group`` (or ``smp.shutdown``), a rank may ask for the second group's store while rank 0
still serves the first one's, and would lose it with the first group. So rank 0 gives every store a unique
name, and the others, who know the last one's name, wait for a new one::

    rank 0   serves a ............ closes a   serves b
    rank 1   joins a   leaves a   a, a, a ... joins b
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistBackendError, DistError

from opensmd.collectives.stores.deadlines import GRACE, call_within

__all__ = ["StoresInTurn"]

NAME = "opensmd/store"  # the key of a store's name
BETWEEN_LOOKS = 0.005  # seconds

Address = tuple[str, int]


class StoresInTurn:
    """The names of the stores that this process has joined last, by address."""

    def __init__(self) -> None:
        self._last: dict[Address, bytes] = {}
        self._unread: set[Address] = set()

    def served(self, store: Store) -> None:
        """Give a name to the store that this process has just created."""
        store.set(NAME, uuid.uuid4().hex)
        store.check([NAME])  # answered after it, while `set` does not wait until the name is there

    def joined(self, address: Address, connect: Callable[[], Store], timeout: float) -> Store:
        """Return a client of the store at ``address``, once it differs from the last one there.

        Args:
            address: host and port, as this process was given them.
            connect: creates a client, and raises if nothing answers in time.
            timeout: seconds to wait for another store.

        Raises:
            DistBackendError: the last one is still served after that time.
        """
        last = self._last.get(address)
        if last is None:
            store = connect()
            self._unread.add(address)  # rank 0 may not have named it yet
            return store
        end = time.monotonic() + timeout
        store = _connected_in_turn(connect, timeout)
        while True:
            try:
                name = call_within(timeout + GRACE, partial(_name, store))
            except TimeoutError:
                raise DistBackendError(f"{_at(address)} did not answer within {timeout:g} s") from None
            except RuntimeError:  # it was closed
                store = _connected_in_turn(connect, timeout)
                continue
            if name not in (None, last):
                self._last[address] = name
                return store
            if time.monotonic() > end:
                raise DistBackendError(
                    f"{_at(address)} is that of the process group before, which rank 0 has not replaced for "
                    f"{timeout:g} s: call destroy_process_group and init_process_group on all ranks in the "
                    "same order, or give the next group another port."
                )
            time.sleep(BETWEEN_LOOKS)

    def remember(self, store: Store) -> None:
        """Read the name of a store that this process has joined, after rank 0 has joined the group, too."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return
        address = (store.host, store.port)
        if address in self._unread:
            self._unread.discard(address)
            if (name := _name(store)) is not None:
                self._last[address] = name


def _connected_in_turn(connect: Callable[[], Store], timeout: float) -> Store:
    """Return a client of the current store; retry if the last one closed during the client's greeting.

    torch itself retries only until it is accepted. A failure after a longer time has another cause.
    """
    end = time.monotonic() + timeout / 2
    while True:
        try:
            return connect()
        except DistError:
            if time.monotonic() >= end:
                raise
        time.sleep(BETWEEN_LOOKS)


def _name(store: Store) -> bytes | None:
    return store.get(NAME) if store.check([NAME]) else None


def _at(address: Address) -> str:
    return f"the store at {address[0]}:{address[1]}"
