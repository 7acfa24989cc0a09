"""Which functions of Python in a graph begin a backward of their own, as reentrant checkpoints do.

Such a backward reaches whatever the function has used in its forward, of which the graph around it shows
nothing: it may lead to another rank. So these functions run in a backward's first part. They are known by
what their ``backward`` names, whatever they are called.
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


# Not by functools.lru_cache, which would keep classes alive, and the models that they refer to.
_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def begins_backward(context: Any) -> bool:
    """Whether a node's function begins a backward; ``context`` is the ``ctx`` that it is given."""
    context_class = context.__class__
    known = _known.get(context_class)
    if known is None:
        known = _known[context_class] = _names_backward(backward_of_node(context_class), set())
    return known


def _names_backward(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    """Whether a function, or one of Python that it calls by name, names something like a backward."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return True  # nothing is known of compiled code
    if plain.__code__ in seen:
        return False
    seen.add(plain.__code__)
    names = list(_names_in(plain.__code__))
    # Of methods, whose objects are not known, the name must do.
    if any("backward" in name for name in names):
        return True
    used = [plain.__globals__.get(name) for name in names]
    used += inspect.getclosurevars(plain).nonlocals.values()
    return any(
        value is torch.autograd.backward or (isinstance(value, FunctionType) and _names_backward(value, seen))
        for value in used
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """The globals, attributes and methods that code names, with that of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
