"""How many bytes of tensors a stretch of code has alive at once, at the fullest moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveTensors"]


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts the memory of results of this thread's operations, for as long as it lives.

    Attributes:
        most: bytes at the fullest moment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) or not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            if leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.most = max(self.most, self._bytes())
        return result

    def _bytes(self) -> int:
        """What lives now; storages may have been emptied since they were made."""
        total = 0
        for key, known in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total
