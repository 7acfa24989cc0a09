"""Mapping CUDA in spawned processes as well, where scripts that start their own ranks use it.

A new process first reads the parent's paths and arguments, and then imports the script. So an object among
these that installs the mapping when it is read comes in time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["told_to_map"]


def told_to_map(
    get_preparation_data: Callable[..., dict[str, Any]], install: Callable[[], None]
) -> Callable[..., dict[str, Any]]:
    """Make what ``multiprocessing`` sends to a new process call ``install`` when it is read."""

    @wraps(get_preparation_data)
    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**get_preparation_data(*args, **kwargs), "opensmd_mapped_cuda": _CalledWhenRead(install)}

    return call


class _CalledWhenRead:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._function, ()
