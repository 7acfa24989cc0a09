"""Recognizing storages of tensors without keeping them alive."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opensmd.modelparallel._torch_internals import out_of_transforms

__all__ = ["StorageReference", "StorageSet", "has_storage", "lies_in", "overlapping"]


class StorageReference:
    """Knows when a storage is gone, so that another at the same address is not mistaken for it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


class StorageSet:
    """The storages of some tensors, for as long as they live. Only strided tensors have one."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        # An address alone is not enough: freed memory is reused.
        known = self._references.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def add(self, tensor: Tensor) -> bool:
        """Add the tensor's storage; return whether it is new."""
        if tensor in self or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        self._references[storage._cdata] = StorageReference(storage)
        return True


def lies_in(tensor: Tensor, storages: frozenset[int]) -> bool:
    """Whether the tensor is in one of ``storages``, which stay alive (``untyped_storage()._cdata``)."""
    if not storages or tensor.layout is not torch.strided:
        return False
    return out_of_transforms(tensor).untyped_storage()._cdata in storages


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor's data is in one storage: it is strided, and not made of other tensors."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def overlapping(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Group tensors that have bytes in common, directly or through others.

    Returns:
        For the ``id`` of every tensor, that of a common representative of its group.
    """
    given = list(tensors)
    one_of = {id(tensor): id(tensor) for tensor in given}
    with_bytes = [tensor for tensor in given if has_storage(tensor) and tensor.numel()]
    # Ordered by first byte, a tensor overlaps an earlier one only if it starts before the furthest end.
    end, group = (0, 0), 0
    for (storage, first, last), number in sorted((_extent(tensor), id(tensor)) for tensor in with_bytes):
        if storage == end[0] and first < end[1]:
            last = max(last, end[1])
        else:
            group = number
        one_of[number] = group
        end = (storage, last)
    return one_of


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the tensor's storage, its first byte and the one after its last."""
    # The distance from the first to the last element; expanded tensors (stride 0) span less than their
    # elements.
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage()._cdata, first, first + (int(reach) + 1) * tensor.itemsize
