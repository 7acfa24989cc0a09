"""Storages of tensors that are known by what they were, and are not kept alive for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageReference", "StorageSet", "lies_in"]


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
    return bool(storages) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages
