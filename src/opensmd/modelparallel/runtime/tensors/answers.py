"""What can be asked of a tensor whose data is elsewhere: the one list of it.

Its shape, dtype, device, layout and what follows from them; never its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["WITHOUT_DATA", "getter", "setter"]

Function = Callable[..., Any]


def getter(name: str) -> Function:
    """The function behind reading the attribute ``name`` of a tensor."""
    found: Function = getattr(Tensor, name).__get__
    return found


def setter(name: str) -> Function:
    """The function behind setting the attribute ``name`` of a tensor."""
    found: Function = getattr(Tensor, name).__set__
    return found


def _of(owner: Any, names: str) -> set[Function]:
    # Supported versions of torch differ in which of them they have.
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


_ATTRIBUTES = (
    "shape dtype device layout ndim is_cuda is_cpu is_mps is_xpu is_meta is_mtia is_sparse is_sparse_csr "
    "is_mkldnn is_quantized is_nested names itemsize nbytes"
)

WITHOUT_DATA: frozenset[Function] = frozenset(
    {getter(name) for name in _ATTRIBUTES.split() if hasattr(Tensor, name)}
    | _of(
        Tensor,
        "size dim stride numel nelement element_size ndimension is_floating_point is_complex is_contiguous "
        "get_device __len__ is_signed is_same_size storage_offset is_inference is_conj is_neg __hash__ "
        "is_pinned is_shared",
    )
    | _of(
        torch,
        "is_floating_point is_complex numel is_tensor is_conj is_neg is_signed is_same_size is_inference "
        "is_storage",
    )
)
