"""The store of several hosts' agents, where the job has a secret: no agent acts on what a stranger wrote."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from opensmd.environment.job_secret import JobSecret
from opensmd.launch.stores.agents_store import AgentsStore

__all__ = ["SealedStore"]


class SealedStore(AgentsStore):
    """Another store whose values are sealed with a secret, each under its own key.

    Counters of ``add`` are the store's own and cannot be: who writes to them can stop a job, no more.
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
            SecretError: it was written by somebody who does not know the secret.
        """
        return self._secret.open(key, super().get(key))
