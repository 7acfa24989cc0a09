"""Finding Python functions in a graph that start their own backward, as reentrant checkpoints do.

Such a backward reaches whatever the function has used in its forward, which is invisible in the outer graph:
it may lead to another rank. So these functions run in a backward's first part. They are recognized by the
names used in their ``backward``, not by their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opensmd.modelparallel._torch_internals import backward_of_node

__all__ = ["begins_backward"]


# Not functools.lru_cache, which would keep classes alive, and with them their models.
_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def begins_backward(context: Any) -> bool:
    """Whether a node's function starts a backward; ``context`` is its ``ctx``."""
    context_class = context.__class__
    known = _known.get(context_class)
    if known is None:
        known = _known[context_class] = _names_backward(backward_of_node(context_class), set())
    return known


def _names_backward(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    """Whether a function, or a Python function that it calls by name, names something like a backward."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return True  # compiled code is opaque
    if plain.__code__ in seen:
        return False
    seen.add(plain.__code__)
    names = list(_names_in(plain.__code__))
    # For methods, whose objects are unknown, the name must suffice.
    if any("backward" in name for name in names):
        return True
    used = [plain.__globals__.get(name) for name in names]
    used += inspect.getclosurevars(plain).nonlocals.values()
    return any(
        value is torch.autograd.backward or (isinstance(value, FunctionType) and _names_backward(value, seen))
        for value in used
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """Return the globals, attributes and methods that code and the functions inside it name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
