"""Reading a CUDA device as the CPU, as ``--device cpu`` does wherever a device is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["device_index", "on_cpu", "translated", "without_cuda"]


def without_cuda(device: Any) -> Any:
    """Replace CUDA by the CPU; return anything else than a CUDA device unchanged.

    To torch, a number means a device of the machine's accelerator, so here it means the CPU.
    """
    if isinstance(device, str):
        return "cpu" if device == "cuda" or device.startswith("cuda:") else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    return device


def device_index(device: Any, current: int, count: int) -> int:
    """Return the number of a CUDA device, given as to torch.cuda or as text (``"1"``), as one guide does.

    Raises:
        ValueError: not a CUDA device.
        RuntimeError: there is no device of that number.
    """
    if device is None:
        return current
    if isinstance(device, torch.device) and device.type == "cpu":  # that of a tensor
        return current
    if isinstance(device, str) and not device.isdigit():
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"expected a CUDA device, got {device}")
        device = current if device.index is None else device.index
    index = int(device)
    if index >= count:
        raise RuntimeError(
            f"invalid device ordinal {index}: under --device cpu there is one device for each rank of this "
            f"host, or as many as CUDA_VISIBLE_DEVICES names: here {count}, cuda:0 to cuda:{count - 1}"
        )
    return current if index < 0 else index


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to translate its keyword ``device`` and drop ``pin_memory``: nothing is pinned."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = without_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def translated(function: Callable[..., Any], position: int, keyword: str = "device") -> Callable[..., Any]:
    """Wrap ``function`` to translate its argument at ``position``, also when given as ``keyword``."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], without_cuda(args[position]), *args[position + 1 :])
        if keyword in kwargs:
            kwargs[keyword] = without_cuda(kwargs[keyword])
        return function(*args, **kwargs)

    return call
