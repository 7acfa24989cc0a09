"""Random number generators that modules own.

A run that is undone must not have drawn from them: otherwise the planning rank would continue with other
numbers than plain PyTorch and, between stages, than the other ranks. Modules draw from them in the order of
the microbatches.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

__all__ = ["states", "ways_back"]


def states(values: Iterable[Any]) -> list[bytes]:
    """Return the states of the generators among ``values``, for comparison."""
    return [_told(access.state()) for access in map(_access, values) if access is not None]


def ways_back(values: Iterable[Any]) -> list[Callable[[], object]]:
    """Return functions that restore the current state of each generator among ``values``."""
    found = {id(value): _access(value) for value in values}
    return [partial(access.put, access.state()) for access in found.values() if access is not None]


class _Access(NamedTuple):
    """How to read and set a generator's state."""

    state: Callable[[], Any]
    put: Callable[[Any], object]


def _access(value: Any) -> _Access | None:
    if isinstance(value, torch.Generator):
        return _Access(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Access(value.getstate, value.setstate)
    if isinstance(value, numpy.random.RandomState):
        return _Access(partial(value.get_state, legacy=False), value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _Access(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    return None


def _told(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)
