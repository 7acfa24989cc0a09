"""Functions of torch by name, as function modes see them, as far as this version has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["Function", "functions_of", "getter", "setter"]

Function = Callable[..., Any]


def functions_of(owner: Any, names: str | Iterable[str]) -> set[Function]:
    """Return the functions of ``owner`` with these names (separated by spaces), as far as it has them.

    Supported versions of torch differ in these.
    """
    names = names.split() if isinstance(names, str) else names
    return {getattr(owner, name) for name in names if callable(getattr(owner, name, None))}


def getter(name: str) -> Function:
    """Return the function behind reading the attribute ``name`` of a tensor."""
    function: Function = getattr(Tensor, name).__get__
    return function


def setter(name: str) -> Function:
    """Return the function behind setting the attribute ``name`` of a tensor."""
    function: Function = getattr(Tensor, name).__set__
    return function
