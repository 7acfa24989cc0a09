"""The store of several hosts' agents, whose long waits end at a signal, or when another host has ended.

torch's own wait in C++ delays signals until it ends: five minutes at the end of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["AgentsStore"]

ASK_EVERY = 0.05  # seconds


class AgentsStore(Store):
    """Wraps a store, with the same keys and values.

    Args:
        store: the wrapped one.
        in_vain: whether waiting is pointless, because another host has ended.
    """

    def __init__(self, store: Store, in_vain: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._store, self._in_vain = store, in_vain

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._store.get(key)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, like :meth:`get`."""
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: a key did not appear in time, or another host has ended.
        """
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self._store.check(keys):
            if self._in_vain():
                raise dist.DistStoreError(f"another host has ended without {', '.join(keys)}")
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{', '.join(keys)} did not come in time")
            time.sleep(ASK_EVERY)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait from now on."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long to wait by default."""
        store: Any = self._store  # torch's stubs lack it
        return timedelta(seconds=store.timeout.total_seconds())
