"""Processes that a mapped process spawns are mapped, too: there, scripts that start their own ranks use CUDA.

What a new process reads first are the parent's paths and arguments. An object among them that installs the
mapping when it is read comes before the script, which the process imports next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["told_to_map"]


def told_to_map(
    get_preparation_data: Callable[..., dict[str, Any]], install: Callable[[], None]
) -> Callable[..., dict[str, Any]]:
    """What ``multiprocessing`` tells a new process, which calls ``install`` when it reads that."""

    @wraps(get_preparation_data)
    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**get_preparation_data(*args, **kwargs), "opensmd_mapped_cuda": _CalledWhenRead(install)}

    return call


class _CalledWhenRead:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._function, ()
