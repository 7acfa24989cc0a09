"""The store of several hosts' agents in a job with a secret: no agent acts on what a stranger wrote."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from opensmd.environment.job_secret import JobSecret
from opensmd.launch.stores.agents_store import AgentsStore

__all__ = ["SealedStore"]


class SealedStore(AgentsStore):
    """Wraps a store and seals each value with a secret, under its own key.

    The counters of ``add`` cannot be sealed, because the store itself adds. Whoever writes to them can stop a
    job, but no more.
    """

    def __init__(self, store: Store, secret: JobSecret, in_vain: Callable[[], bool] = lambda: False) -> None:
        super().__init__(store, in_vain)
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else value
        super().set(key, self._secret.seal(key, data))

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            SecretError: the value was written by somebody who does not know the secret.
        """
        return self._secret.open(key, super().get(key))
