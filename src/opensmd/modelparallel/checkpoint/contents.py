"""Finding parts of an object that would not load again; pure."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.checkpoint.trusted import is_trusted, load_without_trust

__all__ = ["describe", "find_unloadable"]

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_HARMLESS = (torch.Tensor, nn.Parameter, type(None), bool, float, complex, str, bytes)


def find_unloadable(value: Any, name: str) -> tuple[str, Any] | None:
    """Find the first thing in ``value`` that loads only with trust, and its path from ``name``.

    Return None if there is none.
    """
    return _find(value, name, set())


def describe(value: Any) -> str:
    """Describe a value in an error."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function or class {value.__module__}.{value.__qualname__}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"


def _find(value: Any, name: str, seen: set[int]) -> tuple[str, Any] | None:
    if type(value) in _HARMLESS or _is_small(value) or id(value) in seen:
        return None
    seen.add(id(value))
    if type(value) not in _CONTAINERS:
        if _loads(value):
            return None
        if not is_trusted(type(value)):
            return name, value
    for inner, child in _children(value, name):
        found = _find(child, inner, seen)
        if found is not None:
            return found
    return None if type(value) in _CONTAINERS else (name, value)


def _is_small(value: Any) -> bool:
    """Whether it is a number small enough for torch's reader: at most 255 bytes."""
    return type(value) is int and value.bit_length() < 2000


def _children(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"the key {key!r:.80} of {name}", key
            yield f"{name}[{key!r:.80}]", item
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"an element of {name}", item) for item in value)
    else:
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        load_without_trust(file, map_location="cpu")
    except Exception:  # whatever code of the type raises
        return False
    return True
