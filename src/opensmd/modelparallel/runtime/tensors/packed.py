"""Data of tensors as bytes, for ranks that are to have the same: new tensors, or values for their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["can_be_packed", "pack", "pack_values", "unpack", "unpack_values"]


def can_be_packed(tensor: Tensor, most_bytes: int) -> bool:
    """Whether a tensor is small, has no gradient, and is of no kind that torch stores in a way of its own."""
    return (
        type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and _span(tensor) * tensor.element_size() <= most_bytes
    )


def pack(tensor: Tensor) -> bytes:
    """Return the memory between a tensor's first element and its last one."""
    data = torch.as_strided(tensor.detach(), (_span(tensor),), (1,), tensor.storage_offset())
    packed: bytes = data.cpu().view(torch.uint8).numpy().tobytes()
    return packed


def unpack(
    packed: bytes, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of this form with packed data."""
    # A buffer without bytes is refused.
    numbers = torch.frombuffer(bytearray(packed), dtype=dtype) if packed else torch.empty(0, dtype=dtype)
    tensor: Tensor = torch.empty(0, dtype=dtype, device=device)
    return tensor.set_(numbers.to(device).untyped_storage(), 0, shape, stride)


def pack_values(tensor: Tensor) -> bytes:
    """Return a tensor's elements in their order, whatever its strides."""
    return bytes(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())


def unpack_values(packed: bytes, into: Tensor) -> None:
    """Write packed values into a tensor of the same shape, whose strides may be others."""
    if packed:
        numbers = torch.frombuffer(bytearray(packed), dtype=into.dtype)
        with torch.no_grad():
            into.copy_(numbers.view(into.shape))


def _span(tensor: Tensor) -> int:
    """Return the number of elements of memory from a tensor's first one to its last one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
