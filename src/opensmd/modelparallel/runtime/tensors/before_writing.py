"""Who reads parameters and optimizer state beside training, and is waited for before anything writes them.

Readers wait here for every torch optimizer's step by themselves; what else writes calls ``before_writing``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["Reader", "before_writing"]


class Reader:
    """Something that reads while training goes on, from now until it is closed.

    Args:
        finish: returns when it has read everything.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        _watch_optimizers()
        _readers[id(self)] = self

    def close(self) -> None:
        """End: nobody waits for this reader any more."""
        _readers.pop(id(self), None)


_readers: dict[int, Reader] = {}


def before_writing() -> None:
    """Wait until nobody reads parameters or optimizer state beside training."""
    for reader in list(_readers.values()):
        reader.finish()


@functools.cache
def _watch_optimizers() -> None:
    """Once and for good: torch goes through its hooks while they run, so none can take itself away."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    before_writing()
