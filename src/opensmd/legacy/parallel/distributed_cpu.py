"""``DistributedDataParallelCPU``: averages gradients after each backward pass, in one call per dtype."""

from __future__ import annotations

from typing import Any

import torch

from opensmd.collectives.gradients.flat import copy_back, flatten, group_by_dtype
from opensmd.legacy import api
from opensmd.legacy._torch_internals import after_backward

__all__ = ["DistributedDataParallelCPU"]


class DistributedDataParallelCPU(torch.nn.Module):
    """A module whose parameters start as rank 0's and whose gradients are averaged over all processes.

    Buffers stay each process's own. Only dense gradients in ``.grad`` are averaged, after each backward pass
    of this module's output; every process must use the same parameters in it.

    Args:
        module: the module; its parameters may be on the CPU or, staged, elsewhere.

    Raises:
        AssertionError: ``init_process_group`` has not been called.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._averages = False
        self._queued = False
        for parameter in self.module.parameters():
            api.broadcast(parameter.data, 0)
            if parameter.requires_grad:
                parameter.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward; the next backward pass will average."""
        self._averages = True
        self._queued = False  # torch drops the callbacks of a failed backward pass
        return self.module(*inputs, **kwargs)

    def _queue(self, gradient: torch.Tensor) -> None:
        if self._averages and not self._queued:
            self._queued = True
            after_backward(self._average)

    def _average(self) -> None:
        self._averages = self._queued = False
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        for same_dtype in group_by_dtype(gradients):
            flat = flatten(same_dtype)
            api.all_reduce(flat)
            flat /= api.get_world_size()
            copy_back(flat, same_dtype)
