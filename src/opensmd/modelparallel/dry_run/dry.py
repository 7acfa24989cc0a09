"""Runs that leave the model unchanged, and whether one is in progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.dry_run._torch_internals import own_parametrization_cache
from opensmd.modelparallel.dry_run.restoring import WrittenTensors, untouched
from opensmd.modelparallel.redirection._torch_internals import replaced_backward
from opensmd.modelparallel.runtime.side_effects.random_numbers.script_generators import GeneratorStates

__all__ = ["dry", "is_tracing"]

_local = threading.local()
_backwards: list[nn.Module] = []  # models in a dry run's backward, perhaps in an autograd thread
Backward = Callable[[Callable[..., None], tuple[Any, ...], dict[str, Any]], None]


def is_tracing() -> bool:
    """Return whether this thread is in the dry run before partitioning (``smp.is_tracing``).

    During the dry run's backward this is True for every thread, because nothing else runs backward then.
    """
    return getattr(_local, "depth", 0) > 0 or bool(_backwards)


@contextlib.contextmanager
def dry(
    module: nn.Module, written: WrittenTensors | None, backward: Backward | None = None
) -> Iterator[None]:
    """Mark the thread as tracing, and restore whatever the run may change in the model and its inputs.

    Args:
        module: the model.
        written: sees what is written into parameters and inputs; None if nothing is.
        backward: called in place of backwards, with the original and its arguments. By default backwards do
            nothing; without gradients, an optimizer's step changes nothing.
    """

    def of_this_thread(plain: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_tracing():
            plain(*args, **kwargs)
        elif backward is not None:
            _backwards.append(module)
            try:
                backward(plain, args, kwargs)
            finally:
                _backwards.pop()

    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        # only the current device is used; querying all would initialize CUDA on each
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with (
            untouched(module, written),
            own_parametrization_cache(),
            torch.random.fork_rng(devices),
            _generators_of_the_script(),
            torch.compiler.set_stance("force_eager"),
            replaced_backward(of_this_thread),
        ):
            yield
    finally:
        _local.depth -= 1
        torch.clear_autocast_cache()  # its fakes would reach the real run through a region around the step


@contextlib.contextmanager
def _generators_of_the_script() -> Iterator[None]:
    """Restore Python's and NumPy's generators, because other ranks have no dry run and would differ."""
    before = GeneratorStates.now()
    try:
        yield
    finally:
        before.put()
