"""Failures of a step outside its microbatches: they name the step, and no later step waits for them again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["explained", "poison", "require_sound"]

# Groups on which a step has failed: messages of it may be left, which another engine would take for its own.
_poisoned: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def poison(group: dist.ProcessGroup) -> None:
    """A step has failed on this group."""
    _poisoned.add(group)


def require_sound(group: dist.ProcessGroup) -> None:
    """Begin a step only where none has failed.

    Raises:
        SMPError: a step failed on ``group``.
    """
    if group in _poisoned:
        raise SMPError(
            "a step failed on this process group before, and messages of it may be left: call "
            "torch.distributed.destroy_process_group() and initialise again"
        )


@contextlib.contextmanager
def explained(function: Callable[..., Any], moment: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Name the step in what the process group raises in the body.

    Args:
        function: the user's step function.
        moment: of the step, to be put into a sentence.
        group: the pipeline's, on which no step may follow.

    Raises:
        SMPError: in place of a DistBackendError.
    """
    try:
        yield
    except DistBackendError as error:
        poison(group)
        name = getattr(function, "__qualname__", repr(function))
        raise SMPError(f"the step {name!r} stopped {moment}: {error}") from error
