"""What process groups can carry, and where: Gloo and NCCL read memory as it lies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["control_device", "sendable"]


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small tensors must be for ``group`` to carry them: the CPU, unless only an accelerator's backend
    serves it."""
    if torch.device("cpu") in group._device_types or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def sendable(tensor: Tensor) -> Tensor:
    """The tensor without its graph, contiguous, conjugated or negated in memory; maybe the same memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
