"""Where a store is, for error messages."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["where"]


def where(store: Store) -> str:
    """Describe the store, with its address if it has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
