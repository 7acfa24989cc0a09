"""The list of what can be asked of a tensor whose data is elsewhere.

That is its shape, dtype, device, layout and what follows from them, but never its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.tensors.functions import Function, functions_of, getter

__all__ = ["WITHOUT_DATA"]

_ATTRIBUTES = (
    "shape dtype device layout ndim is_cuda is_cpu is_mps is_xpu is_meta is_mtia is_sparse is_sparse_csr "
    "is_mkldnn is_quantized is_nested names itemsize nbytes"
)

WITHOUT_DATA: frozenset[Function] = frozenset(
    {getter(name) for name in _ATTRIBUTES.split() if hasattr(Tensor, name)}
    | functions_of(
        Tensor,
        "size dim stride numel nelement element_size ndimension is_floating_point is_complex is_contiguous "
        "get_device __len__ is_signed is_same_size storage_offset is_inference is_conj is_neg __hash__ "
        "is_pinned is_shared",
    )
    | functions_of(
        torch,
        "is_floating_point is_complex numel is_tensor is_conj is_neg is_signed is_same_size is_inference "
        "is_storage",
    )
)
