"""What a call does besides returning something: its home compares before and after, and tells the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.descriptions.describing import (
    ArgumentBefore,
    ResultParts,
    describe,
    version_of,
)
from opensmd.modelparallel.runtime.calls.descriptions.description import Description
from opensmd.modelparallel.runtime.side_effects.effects import Effects
from opensmd.modelparallel.runtime.side_effects.random_numbers.own_generators import states
from opensmd.modelparallel.runtime.side_effects.written import written_by_operation
from opensmd.modelparallel.runtime.tensors.memory_layout import is_sparse

__all__ = ["Watch"]


class Watch:
    """Watches one call at its home that is unknown, or whose result depends on data.

    Args:
        call: the call.
        given: the arguments that its function gets.
        tensors: the tensors in them, in the order of ``call.leaves``.
        first: whether nothing is known about calls like it.

    Attributes:
        made: tensors that it left outside its result; set by :meth:`description`, like the next.
        spread: those of them that all ranks get.
        effects: its other effects.
    """

    def __init__(self, call: Call, given: Any, tensors: Sequence[Tensor], *, first: bool) -> None:
        self.made: Sequence[Tensor] = ()
        self.spread: Sequence[Tensor] = ()
        self._call = call
        self._tensors = tensors
        self._first = first
        # Whether a module changes its buffers is learned once; after that it keeps the order anyway.
        self._buffers = _buffers(call.owner) if first else []
        self._buffer_versions = list(map(version_of, self._buffers))
        self._buffer_values = [_value(buffer) for buffer in self._buffers]
        self._generators = _generators(call.owner) if first else []
        self.effects = Effects((call.args, call.kwargs), call.leaves, given, tensors, call.owner)
        self._before = list(map(ArgumentBefore.of, tensors))
        # Versions of sparse tensors also count coalescing, so only a copy is reliable.
        self._sparse = [(tensor, tensor.clone()) for tensor in tensors if is_sparse(tensor)]
        self._data = _WatchForData() if first or torch.is_inference_mode_enabled() else None
        self._around: contextlib.AbstractContextManager[object] = self._data or contextlib.nullcontext()

    def __enter__(self) -> Watch:
        self._around.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def goes_on(self) -> bool:
        """Whether the next call depends on what this one has left in its module: a number, a buffer, a draw.

        For buffers, the first call decides. Valid after :meth:`description`.
        """
        return (
            self.effects.counted
            or self._replaced_buffers()
            or bool(self.written_buffers())
            or (self._first and _generators(self._call.owner) != self._generators)
        )

    def _replaced_buffers(self) -> bool:
        """Whether the first call has created, replaced or deleted buffers of its module."""
        # Compared by identity: tensors would compare their elements.
        return bool(self._buffers) and list(map(id, _buffers(self._call.owner))) != list(
            map(id, self._buffers)
        )

    def written_buffers(self) -> list[Tensor]:
        """Return the module's buffers that the first call wrote into."""
        before = zip(self._buffers, self._buffer_versions, self._buffer_values, strict=True)
        return [
            buffer
            for buffer, version, value in before
            if version_of(buffer) != version or not _is_still(buffer, value)
        ]

    def description(self, parts: ResultParts) -> Description:
        """Return the description of the result ``parts``."""
        call, data = self._call, self._data
        for tensor, before in self._sparse:
            if not _equal(tensor, before):
                raise SMPUnsupportedError(
                    f"{call.name} changed a sparse tensor of shape {tuple(tensor.shape)} in place, which the "
                    "other pipeline ranks would not see. Change a copy instead"
                )
        left = self.effects.found(parts.tensors)
        if left is not None:
            self.made = [each for number, each in enumerate(left.tensors) if number not in left.data]
            self.spread = [left.tensors[number] for number in left.data]
        return describe(
            parts,
            self._tensors,
            before=self._before,
            foreign=[tensor is not leaf for tensor, leaf in zip(self._tensors, call.leaves, strict=True)],
            depends_on_data=(
                # If a call is watched again, an earlier one already depended on data.
                not self._first
                or call.depends_on_data
                or left is not None
                or (data is not None and data.seen)
            ),
            destinations=[n for n, leaf in enumerate(call.leaves) if _is_one_of(leaf, call.written)],
            written=data.written if data is not None else (),
            left=left,
        )


def _buffers(owner: nn.Module | None) -> list[Tensor]:
    return list(owner.buffers()) if isinstance(owner, nn.Module) else []


def _generators(owner: nn.Module | None) -> list[Any]:
    """Return the states of generators in attributes of a module and its submodules."""
    if not isinstance(owner, nn.Module):
        return []
    return states(value for module in owner.modules() for value in module.__dict__.values())


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two sparse tensors have the same values; coalescing changes only the version."""
    return bool(torch.equal(one.detach().to_dense(), other.detach().to_dense()))


def _value(buffer: Tensor) -> Tensor | None:
    """Return a copy if versions do not show changes: torch's norms update their statistics behind them."""
    return buffer.detach().clone() if buffer.is_floating_point() and buffer.layout is torch.strided else None


def _is_still(buffer: Tensor, value: Tensor | None) -> bool:
    return value is None or torch.equal(buffer, value)


def _is_one_of(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(other is tensor for other in others)


class _WatchForData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operations whose result's shape depends on data, or that turn data into Python values.

    Attributes:
        seen: whether there was one.
        written: memory of inference tensors that operations have changed in place.
    """

    TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
    UNTAGGED = frozenset(  # by torch, although their result depends on sequence lengths
        {torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._pad_packed_sequence.default}
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in self.UNTAGGED or not self.TAGS.isdisjoint(func.tags):
            self.seen = True
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            for written in written_by_operation(func, args, kwargs):
                self.written.add(written.untyped_storage()._cdata)
        return func(*args, **kwargs)
