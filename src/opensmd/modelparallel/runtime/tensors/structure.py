"""Tensors in Python structures: finding them, replacing them, and sending a structure without them.

Lists, tuples, named tuples, mappings, slices and dataclasses are searched. Anything else is opaque: it is
passed unchanged, and pickled for other ranks with its tensors taken out.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.outputs import rebuild_mapping, rebuild_sequence

__all__ = [
    "Arguments",
    "are_values",
    "dump_if_possible",
    "can_be_dumped",
    "collect",
    "dump",
    "dump_referring",
    "is_dataclass",
    "is_plain",
    "load",
    "memory_of",
    "opaque_objects",
    "substitute",
    "tensors_in",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call: positional, and by keyword

_VALUES = frozenset({str, int, float, bool, type(None)})  # types that end every search at once
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def collect(structure: Any, found: list[Tensor]) -> None:
    """Append the tensors of ``structure`` to ``found``, in a fixed order."""
    if type(structure) in _VALUES:
        return
    if isinstance(structure, Tensor):
        found.append(structure)
    elif isinstance(structure, (tuple, list)):
        for item in structure:  # most are tensors or plain values, and a call for each would cost time
            if isinstance(item, Tensor):
                found.append(item)
            elif type(item) not in _VALUES:
                collect(item, found)
    elif isinstance(structure, Mapping):
        for value in structure.values():
            collect(value, found)
    elif isinstance(structure, slice):
        collect((structure.start, structure.stop, structure.step), found)
    elif is_dataclass(structure):
        for field in dataclasses.fields(structure):
            collect(getattr(structure, field.name, None), found)


def are_values(values: Iterable[Any]) -> bool:
    """Whether all are plain values, such as the strings and numbers of most calls."""
    return _VALUES.issuperset(map(type, values))


def tensors_in(structure: Any) -> list[Tensor]:
    """Return the tensors of ``structure``, in the order of :func:`collect`."""
    found: list[Tensor] = []
    collect(structure, found)
    return found


def memory_of(structure: Any) -> frozenset[int]:
    """Return the memory of the strided tensors in ``structure`` (``untyped_storage()._cdata``)."""
    tensors: list[Tensor] = []
    collect(structure, tensors)
    return frozenset(
        [tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided]
    )


def substitute(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Replace the tensors that :func:`collect` finds in ``structure`` by the next ones, in its order."""
    if type(structure) in _VALUES:
        return structure
    if isinstance(structure, Tensor):
        return next(tensors)
    if isinstance(structure, (tuple, list)):
        return rebuild_sequence(structure, [substitute(item, tensors) for item in structure])
    if isinstance(structure, Mapping):
        return rebuild_mapping(
            structure, {key: substitute(value, tensors) for key, value in structure.items()}
        )
    if isinstance(structure, slice):
        return slice(
            *(substitute(item, tensors) for item in (structure.start, structure.stop, structure.step))
        )
    if is_dataclass(structure):
        rebuilt = copy.copy(structure)
        for field in dataclasses.fields(structure):
            object.__setattr__(rebuilt, field.name, substitute(getattr(structure, field.name, None), tensors))
        return rebuilt
    return structure


def is_dataclass(value: Any) -> bool:
    """Whether the value is an instance of a dataclass, not a class."""
    return hasattr(type(value), "__dataclass_fields__")


def is_plain(value: Any) -> bool:
    """Whether the value has no tensors and no state: numbers, text, None, dtypes, classes, functions."""
    return isinstance(value, _PLAIN) or callable(value)


def opaque_objects(structure: Any, found: list[Any]) -> None:
    """Append the objects of ``structure`` that are neither searched nor plain, which a callee may change."""
    if isinstance(structure, (Tensor, str, int, float, nn.Module)) or structure is None:
        return
    if isinstance(structure, (tuple, list)):
        for item in structure:
            opaque_objects(item, found)
    elif isinstance(structure, Mapping):
        for value in structure.values():
            opaque_objects(value, found)
    elif is_dataclass(structure):
        for field in dataclasses.fields(structure):
            opaque_objects(getattr(structure, field.name, None), found)
    elif not is_plain(structure) and hasattr(structure, "__dict__"):
        found.append(structure)


class _Dumper(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], known: Sequence[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self.numbers: dict[int, int] = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.known: dict[int, int] = {id(value): -1 - number for number, value in enumerate(known)}
        self.refers = False

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            number = self.known.get(id(value)) if self.known else None
            self.refers |= number is not None
            return number
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self.numbers[id(value)]


class _Loader(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Any], known: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors = tensors
        self.known = known

    def persistent_load(self, number: Any) -> Any:
        return self.tensors[number] if number >= 0 else self.known[-1 - number]


def dump(structure: Any, tensors: list[Tensor], known: Sequence[Any] = ()) -> bytes:
    """Pickle ``structure``; tensors are appended to ``tensors`` and referred to by index.

    ``known`` are objects that the reader also has; they are referred to by index as well.

    Raises:
        Exception: whatever pickle raises for an object that it cannot handle.
    """
    return dump_referring(structure, tensors, known)[0]


def dump_referring(structure: Any, tensors: list[Tensor], known: Sequence[Any]) -> tuple[bytes, bool]:
    """Return :func:`dump`, and whether it refers to any of ``known``."""
    file = io.BytesIO()
    dumper = _Dumper(file, tensors, known)
    dumper.dump(structure)
    return file.getvalue(), dumper.refers


def dump_if_possible(structure: Any, tensors: list[Tensor], known: Sequence[Any] = ()) -> bytes | None:
    """Return :func:`dump`, or None, with no tensor added, for what cannot be pickled.

    Objects may raise any exception for that: a ``ctypes`` pointer raises ValueError.
    """
    count = len(tensors)
    try:
        return dump(structure, tensors, known)
    except Exception:
        del tensors[count:]
        return None


def can_be_dumped(structure: Any, known: Sequence[Any] = ()) -> bool:
    """Whether it can be pickled."""
    return dump_if_possible(structure, [], known) is not None


def load(data: bytes, tensors: Sequence[Any], known: Sequence[Any] = ()) -> Any:
    """Restore what :func:`dump` was given, with these ``tensors`` and ``known`` objects."""
    return _Loader(data, tensors, known).load()
