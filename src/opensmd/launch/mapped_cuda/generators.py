"""``torch.Generator`` that also makes what scripts ask of CUDA: one of the CPU, where all tensors are."""

from __future__ import annotations

from typing import Any

import torch

from opensmd.launch.mapped_cuda.cpu_device import without_cuda

__all__ = ["Generator"]

_Original = torch.Generator


class _OfTorch(type):
    """Generators are torch's own, whichever of both classes is asked."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original)


class Generator(metaclass=_OfTorch):
    """Makes one of torch's own generators."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """The generator of ``device``, of the CPU if that is CUDA."""
        return _Original(without_cuda(device))
