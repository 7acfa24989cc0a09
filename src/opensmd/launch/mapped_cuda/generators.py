"""``torch.Generator`` that, asked for a CUDA generator, creates one for the CPU, where all tensors are."""

from __future__ import annotations

from typing import Any

import torch

from opensmd.launch.mapped_cuda.cpu_device import without_cuda

__all__ = ["Generator"]

_Original = torch.Generator


class _OfTorch(type):
    """Makes ``isinstance`` checks with either class recognize torch's generators."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original)


class Generator(metaclass=_OfTorch):
    """Creates torch's own generators."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator for ``device``, or for the CPU if that is CUDA."""
        return _Original(without_cuda(device))
