"""Random number generators that modules keep for themselves.

A run that is undone has not drawn from them: otherwise the rank that plans would go on with other numbers
than plain PyTorch, and, between stages, than the other ranks. And modules that draw from them do so in the
order of the microbatches.
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
    """Where the generators among ``values`` are, to be compared."""
    return [_told(access.state()) for access in map(_access, values) if access is not None]


def ways_back(values: Iterable[Any]) -> list[Callable[[], object]]:
    """For each generator among ``values`` a function that gives it the state which it has now."""
    found = {id(value): _access(value) for value in values}
    return [partial(access.put, access.state()) for access in found.values() if access is not None]


class _Access(NamedTuple):
    """How a generator's state is read, and given to it."""

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
