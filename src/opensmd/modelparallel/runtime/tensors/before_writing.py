"""Waiting for background readers of parameters and optimizer state before anything writes to them.

Steps of torch optimizers wait automatically; other writers must call ``before_writing``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["Reader", "before_writing"]


class Reader:
    """A background reader, active until it is closed.

    Args:
        finish: returns when everything has been read.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        _watch_optimizers()
        _readers[id(self)] = self

    def close(self) -> None:
        """End this reader, so that nothing waits for it any more."""
        _readers.pop(id(self), None)


_readers: dict[int, Reader] = {}
os.register_at_fork(after_in_child=_readers.clear)  # the readers are the parent's threads


def before_writing() -> None:
    """Wait until no background reader is active."""
    for reader in list(_readers.values()):
        reader.finish()


@functools.cache
def _watch_optimizers() -> None:
    """Register once, for good: torch iterates over its hooks while they run, so none can remove itself."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    before_writing()
