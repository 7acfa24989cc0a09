"""Mixed precision for CUDA, on the CPU: contexts, questions about them, autograd functions, scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from opensmd.launch.mapped_cuda.cpu_device import translated, without_cuda

__all__ = ["precision_places"]


def precision_places() -> Iterator[tuple[Any, str, Any]]:
    """Every change, as (owner, name, replacement)."""
    yield torch.amp.autocast_mode.autocast, "__init__", _autocast_on_cpu()
    yield torch.amp.GradScaler, "__init__", _scaler_on_cpu()
    for name in ("custom_fwd", "custom_bwd"):
        replacement = translated(getattr(torch.amp, name), 1, "device_type")
        for owner in (torch.amp, torch.amp.autocast_mode):
            yield owner, name, replacement
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, _asking_the_cpu(getattr(torch, name))
    yield torch, "get_autocast_gpu_dtype", torch.get_autocast_cpu_dtype
    # torch.compile saves and restores what it has asked
    yield torch, "set_autocast_enabled", _set_on_the_cpu(torch.set_autocast_enabled)
    yield torch, "set_autocast_dtype", translated(torch.set_autocast_dtype, 0, "device_type")
    yield torch, "set_autocast_gpu_dtype", torch.set_autocast_cpu_dtype


def _autocast_on_cpu() -> Callable[..., None]:
    original = torch.amp.autocast_mode.autocast.__init__

    @wraps(original)
    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            # CUDA's default is float16, which few CPUs can compute with; the CPU's is bfloat16.
            device_type, dtype = "cpu", torch.bfloat16
        original(self, device_type, dtype, *rest, **kwargs)

    return init


def _scaler_on_cpu() -> Callable[..., None]:
    original = torch.amp.GradScaler.__init__

    @wraps(original)
    def init(self: Any, device: str = "cuda", *rest: Any, **kwargs: Any) -> None:
        original(self, without_cuda(device), *rest, **kwargs)

    return init


def _asking_the_cpu(question: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.is_autocast_enabled`` and the like, which mean CUDA where they are given nothing."""

    @wraps(question)
    def call(device_type: str = "cuda") -> Any:
        return question(without_cuda(device_type))

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it guards autocast's state anyway
    return call


def _set_on_the_cpu(set_enabled: Callable[..., None]) -> Callable[..., None]:
    """``torch.set_autocast_enabled``, which means CUDA where it is given one argument."""

    @wraps(set_enabled)
    def call(*device_type_and_enabled: Any) -> None:
        *device_type, enabled = device_type_and_enabled
        set_enabled(without_cuda(*device_type or ("cuda",)), enabled)

    return call
