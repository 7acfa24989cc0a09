"""Cutting a step's arguments into microbatches; pure."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.outputs import rebuild_mapping, rebuild_sequence
from opensmd.modelparallel.runtime.calls.iterators import is_iterator
from opensmd.modelparallel.runtime.tensors.pieces import is_one_piece

__all__ = ["split_arguments"]


def split_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    microbatches: int,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of ``function`` for each microbatch.

    Tensors are cut along axis 0, or the axis given for their argument, into equal parts that share the
    batch's memory: what a microbatch writes is in the batch afterwards. Lists, tuples, sets, mappings and
    dataclasses are searched and keep their classes. An object with a method ``smp_slice(num_mb, mb, axis)``
    cuts itself. Everything else, including numbers and 0-dimensional tensors, goes to each microbatch as it
    is.

    Raises:
        ValueError: a size that ``microbatches`` does not divide, an iterator, or an option that names no
            argument.
    """
    axes = dict(input_split_axes or {})
    _check_names(function, [*non_split_inputs, *axes])
    parameters = _parameters(function)
    names, extra = parameters.positional, parameters.rest
    whole = set(non_split_inputs)

    def pieces(name: str, value: Any) -> list[Any]:
        if name in whole:
            return [value] * microbatches
        return _pieces(value, axes.get(name, 0), microbatches, f"argument {name!r}")

    positional = [
        pieces(names[i] if i < len(names) else f"{extra}[{i - len(names)}]", value)
        for i, value in enumerate(args)
    ]
    keyword = {name: pieces(name, value) for name, value in kwargs.items()}
    of_each = zip(*positional, strict=True) if positional else [()] * microbatches
    return [(own, {name: pieces[mb] for name, pieces in keyword.items()}) for mb, own in enumerate(of_each)]


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """The names of a function's parameters.

    Attributes:
        all: every name, in order.
        positional: those that may be given by position.
        rest: the name of ``*args``.
        takes_any: whether there is a ``**kwargs``.
    """

    all: tuple[str, ...]
    positional: tuple[str, ...]
    rest: str
    takes_any: bool


# Not functools.lru_cache, which would keep functions alive, and with them their models.
_known: weakref.WeakKeyDictionary[Callable[..., Any], _Parameters] = weakref.WeakKeyDictionary()


def _parameters(function: Callable[..., Any]) -> _Parameters:
    try:
        parameters = _known.get(function)
    except TypeError:  # an object that has no hash, as dataclasses have none, or no weak references
        return _read_parameters(function)
    if parameters is None:
        parameters = _known[function] = _read_parameters(function)
    return parameters


def _read_parameters(function: Callable[..., Any]) -> _Parameters:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Parameters(
        all=tuple(kinds),
        positional=tuple(name for name, kind in kinds.items() if kind in by_position),
        rest=next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL), "args"),
        takes_any=inspect.Parameter.VAR_KEYWORD in kinds.values(),
    )


def _check_names(function: Callable[..., Any], options: Sequence[str]) -> None:
    if not options:
        return
    parameters = _parameters(function)
    if parameters.takes_any:
        return
    unknown = [name for name in options if name not in parameters.all]
    if unknown:
        raise ValueError(
            f"smp.step: {', '.join(map(repr, unknown))} in non_split_inputs or input_split_axes is not "
            f"an argument of {getattr(function, '__name__', function)!s}, "
            f"whose arguments are {', '.join(parameters.all)}"
        )


def _pieces(value: Any, axis: int, count: int, where: str) -> list[Any]:
    if isinstance(value, Tensor):
        return _tensor_pieces(value, axis, count, where)
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, mb, axis) for mb in range(count)]
    if isinstance(value, Mapping):
        cut = {key: _pieces(entry, axis, count, f"{where}[{key!r}]") for key, entry in value.items()}
        return [
            rebuild_mapping(value, {key: pieces[mb] for key, pieces in cut.items()}) for mb in range(count)
        ]
    if isinstance(value, (list, tuple)):
        items = [_pieces(item, axis, count, f"{where}[{i}]") for i, item in enumerate(value)]
        return [rebuild_sequence(value, [pieces[mb] for pieces in items]) for mb in range(count)]
    if isinstance(value, (set, frozenset)):
        members = [_pieces(member, axis, count, where) for member in value]
        return [type(value)(pieces[mb] for pieces in members) for mb in range(count)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass_pieces(value, axis, count, where)
    if count > 1 and is_iterator(value):
        raise ValueError(
            f"smp.step: {where} is a {type(value).__name__}, of which {count} microbatches would each get "
            "what the others have left. Pass a list of its elements; or name the argument in "
            "non_split_inputs, if the microbatches are to share it"
        )
    return [value] * count


def _tensor_pieces(value: Tensor, axis: int, count: int, where: str) -> list[Tensor]:
    if value.dim() == 0:
        return [value] * count
    if not is_one_piece(value):
        if count > 1:
            raise ValueError(
                f"smp.step: {where} is made of several tensors (sparse, nested) and is not cut into "
                "microbatches. Name the argument in non_split_inputs, or pass what it is made of and make it "
                "in the step function"
            )
        return [value]
    if not -value.dim() <= axis < value.dim():
        raise ValueError(f"smp.step: {where} of shape {tuple(value.shape)} has no axis {axis} to split along")
    if value.shape[axis] % count:
        raise ValueError(
            f"smp.step: {where} of shape {tuple(value.shape)} has {value.shape[axis]} entries along axis "
            f"{axis}, which {count} microbatches do not divide. Use a batch size that is a multiple of "
            f"{count} (drop_last=True in the loader), or name the argument in non_split_inputs"
        )
    return [value.view_as(value)] if count == 1 else _by_themselves(value, axis, count)


def _by_themselves(value: Tensor, axis: int, count: int) -> list[Tensor]:
    """Cut a tensor into equal pieces of the same memory, each with its own version counter.

    What one microbatch writes into its piece then does not count as a change of what another has saved for
    backward. Pieces of a tensor with a graph stay in the graph; nothing may be written into them anyway.
    """
    if value.requires_grad and torch.is_grad_enabled():
        return list(value.tensor_split(count, axis))
    return list(value.unsafe_chunk(count, axis))  # pieces of plain chunk() share a counter


def _dataclass_pieces(value: Any, axis: int, count: int, where: str) -> list[Any]:
    fields = {
        field.name: _pieces(getattr(value, field.name), axis, count, f"{where}.{field.name}")
        for field in dataclasses.fields(value)
    }
    copies = []
    for mb in range(count):
        piece = copy.copy(value)
        for name, pieces in fields.items():
            object.__setattr__(piece, name, pieces[mb])
        copies.append(piece)
    return copies
