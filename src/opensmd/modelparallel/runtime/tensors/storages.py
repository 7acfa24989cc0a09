"""Storages of tensors that are known by what they were, and are not kept alive for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opensmd.modelparallel._torch_internals import out_of_transforms

__all__ = ["StorageReference", "StorageSet", "has_storage", "lies_in", "overlapping"]


class StorageReference:
    """Knows when a storage is gone, so that another at the same address is not taken for it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


class StorageSet:
    """The storages of some tensors, as long as they live. Tensors that are not strided have none."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        # An address alone is not enough: memory that was freed is given out again.
        known = self._references.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def add(self, tensor: Tensor) -> bool:
        """Put the tensor's storage in; whether it was not there."""
        if tensor in self or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        self._references[storage._cdata] = StorageReference(storage)
        return True


def lies_in(tensor: Tensor, storages: frozenset[int]) -> bool:
    """Whether the tensor is in one of ``storages``, which live on (``untyped_storage()._cdata``)."""
    if not storages or tensor.layout is not torch.strided:
        return False
    return out_of_transforms(tensor).untyped_storage()._cdata in storages


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor's data is in one storage: it is strided, and no subclass made of other tensors."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def overlapping(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Which tensors have bytes in common, directly or through others.

    Returns:
        For the ``id`` of every tensor that of one in its group, the same for all of the group.
    """
    given = list(tensors)
    one_of = {id(each): id(each) for each in given}
    with_bytes = [each for each in given if has_storage(each) and each.numel()]
    # In order of their first bytes, a tensor overlaps an earlier one only if it begins before the furthest
    # end.
    end, group = (0, 0), 0
    for (storage, first, last), number in sorted((_extent(each), id(each)) for each in with_bytes):
        if storage == end[0] and first < end[1]:
            last = max(last, end[1])
        else:
            group = number
        one_of[number] = group
        end = (storage, last)
    return one_of


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The tensor's storage, and the first of its bytes and the one after the last."""
    # The last element's distance from the first; expanded tensors (stride 0) reach less than they have
    # elements.
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage()._cdata, first, first + (int(reach) + 1) * tensor.itemsize
