"""A run that leaves the model as it was, and whether one is under way."""

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
_backwards: list[nn.Module] = []  # models that go backward in a dry run: on a GPU in a thread of autograd's
Backward = Callable[[Callable[..., None], tuple[Any, ...], dict[str, Any]], None]


def is_tracing() -> bool:
    """Whether this thread is in the dry run that precedes partitioning (``smp.is_tracing``).

    While a dry run goes backward every thread is: nobody else goes backward meanwhile.
    """
    return getattr(_local, "depth", 0) > 0 or bool(_backwards)


@contextlib.contextmanager
def dry(
    module: nn.Module, written: WrittenTensors | None, backward: Backward | None = None
) -> Iterator[None]:
    """Mark the thread as tracing, and put back whatever the run may change in the model and its inputs.

    Args:
        module: the model.
        written: sees what is written into parameters and inputs; None where nothing is.
        backward: instead of backwards, with the original and its arguments. By default they do nothing:
            without gradients, an optimizer's step changes nothing.
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
        # of several devices only the current one is used; asking for all would start CUDA on each
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
        torch.clear_autocast_cache()  # of fakes, which a region around the step would hand to the real run


@contextlib.contextmanager
def _generators_of_the_script() -> Iterator[None]:
    """Put Python's and NumPy's back: the other ranks, which have no dry run, would draw other numbers."""
    before = GeneratorStates.now()
    try:
        yield
    finally:
        before.put()
