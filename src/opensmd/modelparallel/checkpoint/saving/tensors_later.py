"""Tensors whose data exist only when their turn in the file comes.

``torch.save`` first writes what refers to tensors, and then the memory of each, which it requests with
``.cpu()``. The file is the same as with ordinary tensors. The private parts of torch used here are the names
of the two functions below and ``TypedStorage``; tests/unit/modelparallel/checkpoint/saving fails when torch
changes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2
from torch.storage import TypedStorage

__all__ = ["LaterMemory", "TensorLater"]


class LaterMemory(torch.UntypedStorage):
    """Memory on no device, which :attr:`fetch` supplies on request."""

    fetch: Callable[[], Tensor]

    def cpu(self) -> torch.UntypedStorage:
        """Return the memory of the one-dimensional tensor from :attr:`fetch`."""
        return self.fetch().untyped_storage()


class TensorLater:
    """A contiguous tensor for ``torch.save``.

    Args:
        memory: shared by all tensors with the same data; see :meth:`memory_for`.
    """

    def __init__(self, memory: LaterMemory, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._memory, self._shape, self._dtype = memory, shape, dtype

    @staticmethod
    def memory_for(elements: int, dtype: torch.dtype, fetch: Callable[[], Tensor]) -> LaterMemory:
        """Return memory that ``fetch`` supplies as a one-dimensional CPU tensor of so many elements."""
        memory = LaterMemory(elements * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
        memory.fetch = fetch
        return memory

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        storage: Any = TypedStorage(wrap_storage=self._memory, dtype=self._dtype, _internal=True)  # type: ignore[no-untyped-call]
        storage._fake_device = "cpu"  # the device it loads to; torch's own mark
        strides = torch.empty(self._shape, device="meta").stride()
        return _rebuild_tensor_v2, (storage, 0, self._shape, strides, False, OrderedDict())
