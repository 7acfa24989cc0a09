"""Tensors as engines can carry them: contiguous, on the engine's device, of a known type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Wire", "as_bytes", "bytes_of", "in_memory", "is_in_memory"]


@dataclass(frozen=True)
class Wire:
    """What an engine accepts.

    Attributes:
        device: the type of device whose tensors it accepts.
        moves: dtypes it can move; others travel as bytes. None: all.
        reduces_as: dtypes that it must reduce as another dtype.
        spares_tensors: whether its reduce leaves the tensors of ranks other than the root unchanged.
    """

    device: str
    moves: frozenset[torch.dtype] | None = None
    reduces_as: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    spares_tensors: bool = False

    def takes(self, tensor: torch.Tensor, *, reducing: bool) -> bool:
        """Whether the engine can work on this tensor itself."""
        known = tensor.dtype not in self.reduces_as if reducing else self._moves(tensor.dtype)
        return known and self.is_here(tensor)

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether the engine can access this memory on its device."""
        return (tensor.is_cpu if self.device == "cpu" else tensor.is_cuda) and is_in_memory(tensor)

    def for_reducing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an equal tensor that the engine can reduce; write the result back with ``copy_``."""
        dtype = self.reduces_as.get(tensor.dtype, tensor.dtype)
        return in_memory(tensor.detach().to(self.place(tensor), dtype))

    def for_moving(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values, contiguous and on the engine's device; perhaps the same."""
        return in_memory(tensor.detach().to(self.place(tensor)))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor as the engine can move it: itself, or its bytes in the same memory."""
        return tensor if self._moves(tensor.dtype) else as_bytes(tensor)

    @property
    def moves_all(self) -> bool:
        """Whether no dtype has to travel as bytes."""
        return self.moves is None

    def _moves(self, dtype: torch.dtype) -> bool:
        return self.moves is None or dtype in self.moves

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Return the device on which the engine handles ``tensor``."""
        return tensor.device if tensor.device.type == self.device else torch.device(self.device)


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous and its memory has its values (``conj`` is applied lazily)."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values for which that is true; perhaps the same."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat ``uint8`` tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    array: Any = as_bytes(tensor).numpy()  # numpy's stubs hide that arrays are buffers
    return memoryview(array)
