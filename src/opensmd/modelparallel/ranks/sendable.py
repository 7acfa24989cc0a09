"""What process groups can carry, and on which device: Gloo and NCCL read raw memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["control_device", "sendable"]


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small tensors of ``group``: the CPU, unless only an accelerator has a backend."""
    if torch.device("cpu") in group._device_types or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def sendable(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous, conjugated or negated in memory; copied only if needed."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
