"""A hash that is the same in every process, by which ranks find messages and compare their models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

__all__ = ["stable_hash"]


def stable_hash(key: Hashable, bits: int) -> int:
    """Return a hash of ``key`` that is the same in every process."""
    # Python salts hashes of strings; the repr of a key has no addresses once functions are named.
    digest = hashlib.blake2b(repr(_stable(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def _stable(key: Any) -> Any:
    if type(key) in (tuple, torch.Size):
        return tuple(map(_stable, key))
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, Callable):  # type: ignore[arg-type]
        return torch.overrides.resolve_name(key) or getattr(key, "__qualname__", type(key).__qualname__)
    return key
