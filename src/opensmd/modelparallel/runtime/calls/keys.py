"""Keys that identify equal calls, made from what all ranks know about arguments and modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel._torch_internals import any_autocast
from opensmd.modelparallel.runtime.tensors.functions import functions_of
from opensmd.modelparallel.runtime.tensors.tags import tensor_key

__all__ = ["argument_key", "call_key"]

_VALUES = frozenset({type(None), int, float, str, bool, torch.dtype, torch.device})

# Whatever numbers they are given, their results are alike: a weight in a loss may change with each step.
_ARITHMETIC = frozenset(
    functions_of(torch, "add sub mul div pow lerp rsub subtract multiply divide true_divide")
    | functions_of(
        Tensor,
        "add sub mul div pow lerp subtract multiply divide true_divide add_ sub_ mul_ div_ "
        "__rsub__ __rdiv__ __pow__ __rpow__",
    )
)


def call_key(
    what: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], epoch: int
) -> tuple[Hashable, ...]:
    """Return a key that identifies equal calls of ``what``; hashable, and the same on all ranks."""
    # Modes are part of it because they change results' dtypes or graphs; so is the epoch, because whether a
    # result requires gradients depends on which parameters are trained.
    if callable(what) and what in _ARITHMETIC:
        arguments = tuple(map(_operand_key, (*args, *kwargs, *kwargs.values())))
    else:
        arguments = (*map(argument_key, args), _named_key(kwargs) if kwargs else ())
    return (
        what,
        *arguments,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _autocast_dtypes() if any_autocast() else None,
        torch.get_default_dtype(),
        epoch,
    )


def _named_key(kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
    # With their types, because 1, 1.0 and True are equal. Most calls have only plain values, and end here.
    kinds = tuple(map(type, kwargs.values()))
    if _VALUES.issuperset(kinds) and float not in kinds:
        return (kinds, *kwargs.items())
    return (*[(name, argument_key(value)) for name, value in kwargs.items()],)


def _operand_key(value: Any) -> Hashable:
    kind = type(value)
    return (kind,) if isinstance(value, (int, float)) and kind is not bool else argument_key(value)


def argument_key(value: Any) -> Hashable:
    """Return what all ranks know about an argument; hashable."""
    if isinstance(value, Tensor):
        return tensor_key(value)
    kind = type(value)
    if isinstance(value, float) and value != value:  # NaN, which equals nothing and would be new each time
        return (kind, "nan")
    if kind in _VALUES or isinstance(value, (int, float, str)):
        return (kind, value)
    if isinstance(value, (tuple, list)):
        return (kind, *[argument_key(item) for item in value])
    if isinstance(value, Mapping):
        return (kind, *[(key, argument_key(item)) for key, item in value.items()])
    if isinstance(value, slice):
        return ("slice", argument_key((value.start, value.stop, value.step)))
    if hasattr(kind, "__dataclass_fields__"):
        fields = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
        return (kind, *((name, argument_key(item)) for name, item in fields))
    return (kind,)


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Return this thread's autocast dtype for each kind of device; None where autocast is off."""
    return tuple(
        [
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "cuda")
        ]
    )
