"""The store of several hosts' agents, where the job has a secret: no agent acts on what a stranger wrote."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from opensmd.environment.job_secret import JobSecret

__all__ = ["SealedStore"]


class SealedStore(Store):
    """Another store whose values are sealed with a secret, each under its own key.

    Counters of ``add`` are the store's own and cannot be: who writes to them can stop a job, no more.
    """

    def __init__(self, store: Store, secret: JobSecret) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._secret.seal(key, data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            SecretError: it was written by somebody who does not know the secret.
        """
        return self._secret.open(key, self._store.get(key))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values; as :meth:`get`."""
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._store.wait(keys, timeout or self.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait from now on."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long to wait."""
        store: Any = self._store  # torch's stubs lack it
        return timedelta(seconds=store.timeout.total_seconds())
