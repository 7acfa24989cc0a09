"""Programs that were written for the CPU, on a GPU: what they make without naming a device is made there.

So the ranks' functions of other tests try CUDA as they are. Numbers that a generator of the CPU draws are the
same ones; torch's own default device would refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.support.cuda import DEVICE

__all__ = ["MadeOnGpu", "on_device"]


class MadeOnGpu(TorchFunctionMode):
    """Inside, factories of torch make tensors on the GPU unless they are told otherwise."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs).to(DEVICE)
        return func(*args, **{**kwargs, "device": DEVICE})


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """What a rank runs: ``function(*args)``, which makes its tensors on the GPU."""
    torch.backends.cudnn.allow_tf32 = False
    with MadeOnGpu():
        return function(*args)
