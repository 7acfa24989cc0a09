"""Results that the dry run has left in ``functools.lru_cache``: tensors without data, for all who ask later.

Models keep index tensors and positional embeddings so. What was computed under fake tensors is forgotten
there, and computed again when it is needed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["forget_fake_results"]

_DEPTH = 4  # of containers in a result; what refers to itself must have an end


def forget_fake_results() -> None:
    """Clear the caches of functions that have fake tensors among their results."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and _holds_fakes(gc.get_referents(each), _DEPTH):
            each.cache_clear()


def _holds_fakes(values: Iterable[Any], depth: int) -> bool:
    for each in values:
        if type(each) is FakeTensor:
            return True
        if depth and type(each) in (tuple, list) and _holds_fakes(each, depth - 1):
            return True
        if depth and type(each) is dict and _holds_fakes([*each.values()], depth - 1):
            return True
    return False
