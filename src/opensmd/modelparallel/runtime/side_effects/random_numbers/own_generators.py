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
from typing import Any

import numpy
import torch

__all__ = ["states", "ways_back"]


def states(values: Iterable[Any]) -> list[Any]:
    """Where the generators among ``values`` are, to be compared."""
    return [state for state in map(_state, values) if state is not None]


def ways_back(values: Iterable[Any]) -> list[Callable[[], object]]:
    """For each generator among ``values`` a function that gives it the state which it has now."""
    found = {id(value): _way_back(value) for value in values}
    return [back for back in found.values() if back is not None]


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (numpy.random.RandomState, numpy.random.Generator)):
        return pickle.dumps(value)
    return None


def _way_back(value: Any) -> Callable[[], object] | None:
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
