"""``DistributedDataParallel`` of torch 1.0: one replica per GPU, one or more GPUs per process.

Within a process it works like ``DataParallel``: inputs are scattered over the process's GPUs, replicas run,
and autograd adds up their gradients in the module's own parameters. Between processes, buckets of gradients
are averaged as soon as backward has filled them, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter_kwargs

from opensmd.collectives.gradients.flat import copy_back, flatten, in_buckets, parts_like
from opensmd.legacy import api
from opensmd.legacy._torch_internals import after_backward

__all__ = ["DistributedDataParallel"]

MEGABYTE = 1 << 20
BROADCAST_BYTES = 10 * MEGABYTE
BUCKET_BYTES = {"nccl": 256 * MEGABYTE}
OTHER_BUCKET_BYTES = 1 * MEGABYTE


class DistributedDataParallel(torch.nn.Module):
    """A module whose parameters and buffers start as rank 0's and whose gradients are averaged over
    processes.

    Args:
        module: the module, on the first of ``device_ids``; or on the CPU, with ``device_ids`` None or empty.
        device_ids: this process's GPUs. None means all visible ones if the module is on a GPU, else the CPU.
        output_device: where outputs are gathered; by default, the first of ``device_ids``.
        dim: the dimension along which inputs are scattered and outputs gathered.
        broadcast_buffers: give every process rank 0's buffers before each forward pass in training mode.

    Raises:
        AssertionError: ``init_process_group`` has not been called.
        ValueError: ``device_ids`` for a module on the CPU.

    A parameter that one process did not use in a pass counts as zero there. The original needed CUDA and gloo
    or nccl; this accepts CPU modules and every backend.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        on_gpu = any(parameter.is_cuda for parameter in module.parameters())
        if device_ids is None:
            device_ids = range(torch.cuda.device_count()) if on_gpu else ()
        if len(device_ids) > 0 and not on_gpu:
            raise ValueError(
                f"DistributedDataParallel: device_ids={list(device_ids)} are GPUs, but the module is on the "
                "CPU; move it to the first of them, or leave device_ids out"
            )
        self.module = module
        self.device_ids = list(device_ids)
        first = self.device_ids[0] if self.device_ids else -1
        self.output_device = first if output_device is None else output_device
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self._share_from_rank_0([*module.parameters(), *module.buffers()])
        self._reducer = BucketReducer([weight for weight in module.parameters() if weight.requires_grad])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward on this process's part of the batch; the next backward will average."""
        if self.training and self.broadcast_buffers:
            self._share_from_rank_0(list(self.module.buffers()))
        if torch.is_grad_enabled():
            self._reducer.prepare()
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        parts, keywords = scatter_kwargs(inputs, kwargs, self.device_ids, self.dim)
        if len(self.device_ids) == 1:
            return self.module(*parts[0], **keywords[0])
        replicas = replicate(self.module, self.device_ids[: len(parts)])
        outputs = parallel_apply(replicas, parts, keywords)
        return gather(outputs, self.output_device, self.dim)

    def _share_from_rank_0(self, tensors: list[Any]) -> None:
        for bucket in in_buckets([tensor.detach() for tensor in tensors], BROADCAST_BYTES):
            flat = flatten(bucket)
            api.broadcast(flat, 0)
            copy_back(flat, bucket)


class BucketReducer:
    """Averages gradients over all processes, bucket by bucket, while backward runs.

    Args:
        parameters: in the module's order; their gradients come roughly in reverse.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        limit = BUCKET_BYTES.get(api.current_session().backend, OTHER_BUCKET_BYTES)
        self._buckets = [Bucket(bucket) for bucket in in_buckets(parameters[::-1], limit)]
        self._next = 0  # buckets before this one have been averaged in this pass
        self._active = False
        self._queued = False
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._on_gradient, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def prepare(self) -> None:
        """Prepare for a backward pass that averages."""
        self._active = True
        self._queued = False  # torch drops the callbacks of a backward pass that fails
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def _on_gradient(self, bucket: Bucket, index: int, parameter: torch.Tensor) -> None:
        if not self._active:
            return
        bucket.missing.discard(index)
        if not self._queued:
            self._queued = True
            after_backward(self._finish)
        # All processes must call in the same order, so a full bucket waits for earlier ones.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].average()
            self._next += 1

    def _finish(self) -> None:
        """End the pass: average what still waits, with zeros for unused parameters."""
        for bucket in self._buckets[self._next :]:
            bucket.average()
        self._active = self._queued = False
        self._next = 0


class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        missing: indices of the parameters without a gradient yet in this backward pass.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[int] = set()

    def average(self) -> None:
        """Average over all processes; a parameter that no process used keeps its gradient."""
        used = [float(index not in self.missing) for index in range(len(self.parameters))]
        first = self.parameters[0]
        if self.missing:
            uses = torch.tensor(used, dtype=first.dtype, device=first.device)
        else:  # without a copy from the host, which would wait for the GPU
            uses = torch.ones(len(used), dtype=first.dtype, device=first.device)
        flat = flatten([*(self._gradient(parameter) for parameter in self.parameters), uses])
        api.all_reduce(flat)
        uses = flat[-len(used) :].clone()
        flat /= api.get_world_size()
        # What this process has used need not be read from a GPU, either.
        self._write_back(flat[: -len(used)], (uses > 0).tolist() if self.missing else [True] * len(used))

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _write_back(self, flat: torch.Tensor, used: list[bool]) -> None:
        parts = parts_like(flat, self.parameters)
        for parameter, part, was_used in zip(self.parameters, parts, used, strict=True):
            if not was_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(part)
