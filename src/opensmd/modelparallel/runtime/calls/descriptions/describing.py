"""How the rank that runs a call describes it to the others: its result, and what it has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.descriptions.description import (
    Change,
    Description,
    LeftDescription,
    TensorDescription,
)
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.memory_layout import is_sparse, strides_of
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder

__all__ = ["ArgumentBefore", "Left", "ResultParts", "check_result", "describe", "version_of"]


@dataclass(slots=True)
class ResultParts:
    """A result, split into its tensors and its form."""

    form: str
    tensors: list[Tensor]
    pickled: bytes = b""
    has_values: bool = False
    refers: bool = False

    @classmethod
    def of(cls, result: Any, what: str, containers: Callable[[], Sequence[Any]] = tuple) -> ResultParts:
        """Split a result.

        Args:
            result: what a call returned.
            what: the call, for error messages.
            containers: gives the lists, mappings and dataclasses among its arguments; if one is returned, it
                must be the same one on all ranks.

        Raises:
            SMPUnsupportedError: it has parts that cannot be sent to another rank.
        """
        if isinstance(result, Tensor):
            return cls("tensor", [result])
        if result is None:
            return cls("none", [])
        if type(result) in (tuple, list) and all(isinstance(item, Tensor) for item in result):
            alone = len(set(map(id, result))) == len(result)
            given = type(result) is list and any(container is result for container in containers())
            if alone and not given:  # otherwise the others must know which are equal
                return cls(type(result).__name__, list(result))
        # The rest is rare: dicts, dataclasses, repeated tensors.
        tensors: list[Tensor] = []
        try:
            pickled, refers = structure.dump_referring(result, tensors, containers())
        # Objects may raise anything when pickled.
        except Exception as error:
            raise SMPUnsupportedError(
                f"what {what} returned cannot be described to the other pipeline ranks: {error}. Return "
                "tensors, or lists, tuples, dicts and dataclasses of them that are defined at the top of a "
                "module"
            ) from error
        return cls("pickle", tensors, pickled, _has_values(result), refers)


def _has_values(result: Any) -> bool:
    """Whether it has anything other than tensors, None and containers, which may differ between calls."""
    if result is None or isinstance(result, Tensor):
        return False
    if isinstance(result, (tuple, list)):
        return any(map(_has_values, result))
    if isinstance(result, Mapping):
        return any(map(_has_values, result.values()))
    if structure.is_dataclass(result):
        return any(_has_values(getattr(result, field.name, None)) for field in dataclasses.fields(result))
    return True


@dataclass(frozen=True, slots=True)
class Left:
    """What a call left outside its result, at its home; see :class:`.LeftDescription`."""

    pickled: bytes
    contents: bytes
    tensors: Sequence[Tensor]
    data: dict[int, bytes]


class ArgumentBefore(NamedTuple):
    """What an argument was before a call."""

    version: int
    memory: int
    form: Any

    @classmethod
    def of(cls, tensor: Tensor) -> ArgumentBefore:
        """Describe the tensor's current state."""
        return cls(version_of(tensor), *_place(tensor))

    def has_form_of(self, tensor: Tensor) -> bool:
        """Whether the tensor still has the same memory and form."""
        return (self.memory, self.form) == _place(tensor)

    def other_form(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the tensor's shape and strides if they have changed, else None."""
        if not _has_memory(tensor) or _place(tensor)[1] == self.form:
            return None
        return tuple(tensor.shape), tensor.stride()


def _place(tensor: Tensor) -> tuple[int, Any]:
    if not _has_memory(tensor):
        return 0, tensor.shape
    return tensor.untyped_storage()._cdata, (tensor.shape, tensor.stride(), tensor.dtype)


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor has been changed in place; inference tensors do not count this."""
    return 0 if tensor.is_inference() else tensor._version


def describe(
    parts: ResultParts,
    arguments: Sequence[Tensor],
    *,
    before: Sequence[ArgumentBefore],
    foreign: Sequence[bool],
    depends_on_data: bool,
    destinations: Collection[int] = (),
    written: Collection[int] = (),
    left: Left | None = None,
) -> Description:
    """Describe a result for the other ranks.

    Args:
        parts: the result.
        arguments: the real tensor arguments.
        before: their state before the call.
        foreign: arguments that came from another home, or are copies.
        depends_on_data: whether shapes or values may differ between calls.
        destinations: the arguments that the operation writes into, whatever their versions say.
        written: memory that was changed in place, for inference tensors, which have no versions.
        left: what the call left outside the result.
    """
    # Of several arguments in one memory, the first represents all: their placeholders share memory, too.
    by_memory: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        if _has_memory(argument):
            by_memory.setdefault(argument.untyped_storage()._cdata, number)
    return Description(
        form=parts.form,
        tensors=tuple(_describe_tensor(tensor, arguments, by_memory, foreign) for tensor in parts.tensors),
        changed=tuple(
            Change(
                number,
                argument.requires_grad,
                before[number].has_form_of(argument),
                before[number].other_form(argument),
            )
            for number, argument in enumerate(arguments)
            # Versions show most changes. The exceptions are writes of equal data, which versions count,
            # sparse tensors, where coalescing counts, and inference tensors, which have no versions.
            if number in destinations
            or (version_of(argument) != before[number].version and not is_sparse(argument))
            or (argument.is_inference() and argument.untyped_storage()._cdata in written)
        ),
        depends_on_data=depends_on_data or parts.has_values,
        pickled=parts.pickled,
        refers=parts.refers,
        left=None
        if left is None
        else LeftDescription(
            left.pickled,
            left.contents,
            tuple(_describe_tensor(tensor, arguments, by_memory, foreign) for tensor in left.tensors),
            left.data,
        ),
    )


def _describe_tensor(
    tensor: Tensor, arguments: Sequence[Tensor], by_memory: Mapping[int, int], foreign: Sequence[bool]
) -> TensorDescription:
    # A fetched copy is an argument only on this rank: if it is returned, it is a new tensor for the others.
    same = next((n for n, argument in enumerate(arguments) if argument is tensor and not foreign[n]), None)
    shares = by_memory.get(tensor.untyped_storage()._cdata) if _has_memory(tensor) else None
    is_view = False
    # Autograd propagates changes through views it knows; memory shared behind its back (detach) is not one.
    if shares is not None and tensor._is_view():
        base = arguments[shares]
        is_view = tensor._base is base or (base._is_view() and tensor._base is base._base)
    return TensorDescription(
        shape=tuple(tensor.shape),
        stride=strides_of(tensor),
        dtype=tensor.dtype,
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
        argument=same,
        shares=shares,
        is_view=is_view,
    )


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) is not Placeholder and tensor.layout is torch.strided


def check_result(description: Description, parts: ResultParts, what: str) -> None:
    """Raise if a result is not what the other ranks expect.

    Raises:
        SMPError: the shapes, dtypes or number of tensors differ.
    """
    # Checked for every call after the first, because the others continue with the first one's description.
    if len(parts.tensors) == len(description.tensors) and all(
        described.fits(tensor) for described, tensor in zip(description.tensors, parts.tensors, strict=True)
    ):
        return
    expected = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in description.tensors]
    found = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in parts.tensors]
    raise SMPError(
        f"{what} returned {found} for arguments for which it returned {expected} before (shape, dtype, "
        "requires_grad). The other pipeline ranks cannot know which: its result must depend on the "
        "structure, shapes and dtypes of its arguments and on train/eval mode only. Place it and what uses "
        "its result on one partition with smp.set_partition"
    )
