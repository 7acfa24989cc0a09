"""Tensors made of others: sparse ones of indices and values, nested ones of values and offsets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.ranks.composite import inside
from opensmd.modelparallel.runtime.tensors.memory_layout import is_sparse

__all__ = ["is_one_piece", "pieces_of"]

_BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})


def is_one_piece(tensor: Tensor) -> bool:
    """Whether the tensor is strided memory, and its class does not say otherwise."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    kind = type(tensor)
    return kind is Tensor or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Return what the tensor is made of, which may in turn be made of others.

    Raises:
        SMPUnsupportedError: it is unknown what the tensor is made of.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if is_sparse(tensor):
        if tensor.layout in _BY_ROWS:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        return list(inside(tensor)[0].values())
    kind = "nested tensor of strided layout" if tensor.is_nested else type(tensor).__name__
    raise SMPUnsupportedError(
        f"an argument of the step is a {kind}, which the ranks of a pipeline cannot compare. Pass the "
        "tensors that it is made of, and make it in the step function"
    )
