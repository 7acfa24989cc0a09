"""``smp.DistributedModel``: the wrapper that runs a model inside steps.

So far it runs models on one partition, with microbatches and with data parallelism over replicas; several
partitions are refused when the model is wrapped. The first step places the model (everything stays here),
broadcasts it to the replicas, loads what waited, and runs the hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensmd.modelparallel.capture import describe
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.hybrid import CommHook, Replicas
from opensmd.modelparallel.model_state import ModelState
from opensmd.modelparallel.partition import manual_partition
from opensmd.modelparallel.ranks import CommGroup
from opensmd.modelparallel.report.table import print_plan
from opensmd.modelparallel.state import state

__all__ = ["DistributedModel"]


class DistributedModel(ModelState):
    """A module whose forward and backward run inside ``smp.step`` functions (seed 002).

    Args:
        module: the model; not a ScriptModule and not wrapped in DistributedDataParallel.
        trace_device: ``"gpu"`` or ``"cpu"``; there is nothing to trace with one partition.
        trace_execution_times: likewise; must be False with ``trace_device="cpu"``.
        overlapping_allreduce: send gradients to the replicas during the last microbatch's backward.
        backward_passes_per_step: steps whose gradients add up before the replicas reduce them.
        average_grads_across_microbatches: divide gradients by the number of microbatches.
        bucket_cap_mb: size of gradient buckets in MiB.
        trace_memory_usage: as ``trace_execution_times``.
        broadcast_buffers: send the first replica's buffers to the others in each step.
        gradient_as_bucket_view: let gradients be views of the buckets.
        find_unused_parameters: look for parameters that the last backward does not reach.

    Raises:
        SMPNotInitializedError: before ``smp.init``.
        SMPUnsupportedError: the settings ask for more than one partition.
        SMPError: the script has wrapped a model already.
        TypeError, ValueError: a bad argument.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        cfg = state.require("smp.DistributedModel").cfg
        _check(module, trace_device, trace_execution_times)
        if cfg.pipeline_parallel_degree > 1:
            raise SMPUnsupportedError(
                f"partitions={cfg.pipeline_parallel_degree}: models run on one partition only so far; set "
                "partitions to 1 (with ddp=True the other ranks become replicas). `smd plan` shows how it "
                "would be split"
            )
        super().__init__(module)
        self._average = average_grads_across_microbatches
        self._comm_hooks: list[tuple[Any, CommHook]] = []
        self._replicas: Replicas | None = None
        self._replica_options: dict[str, Any] = {
            "overlapping_allreduce": overlapping_allreduce,
            "backward_passes_per_step": backward_passes_per_step,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
        }
        self._step: _Step | None = None
        state.model = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a step."""
        self._require_step("forward")
        return self.module(*args, **kwargs)

    def backward(
        self, tensors: Tensor | Sequence[Tensor], grad_tensors: Tensor | Sequence[Tensor | None] | None = None
    ) -> None:
        """What replaces ``loss.backward()`` and ``torch.autograd.backward(tensors, grad_tensors)``.

        Args:
            tensors: a loss, or tensors with their incoming gradients.
            grad_tensors: one for each tensor; None for tensors of one element.
        """
        step = self._require_step("backward")
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None or isinstance(grad_tensors, Tensor):
            given: list[Tensor | None] = [grad_tensors] * len(roots)
        else:
            given = list(grad_tensors)
        gradients = [_root_gradient(root, gradient) for root, gradient in zip(roots, given, strict=True)]
        if self._average:
            gradients = [gradient / step.microbatches for gradient in gradients]
        if self._replicas is not None and step.is_last_backward():
            self._replicas.before_last_backward(roots)
        torch.autograd.backward(roots, gradients)

    def join(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """torch's ``DistributedDataParallel.join`` for replicas with different numbers of steps.

        Raises:
            SMPError: without data parallelism, or before the first step.
        """
        if self._replicas is None:
            raise SMPError(
                "join() is that of the inner DistributedDataParallel, which exists with ddp=True after the "
                "first step"
            )
        return self._replicas.join(*args, **kwargs)

    def register_comm_hook(self, hook_state: Any, hook: CommHook) -> None:
        """Replace the reduction of gradient buckets, as torch's ``register_comm_hook`` does."""
        if not state.cfg.ddp:
            raise SMPError("a comm hook needs ddp=True: without it nothing is sent between replicas")
        self._comm_hooks.append((hook_state, hook))
        if self._replicas is not None:
            self._replicas.register_comm_hook(hook_state, hook)

    @contextlib.contextmanager
    def running(self, microbatches: int) -> Iterator[_Step]:
        """The span of one step; used by ``smp.step``."""
        if self._step is not None:
            raise SMPError("a smp.step function was called inside another one; call them one after the other")
        if not self.partitioned:
            self._place()
        if self._replicas is not None:
            self._replicas.before_step()
        self._step = step = _Step(microbatches)
        try:
            yield step
        finally:
            self._step = None
        if self._replicas is not None:
            self._replicas.after_step(backward_ran=step.backwards > 0)
        self.finish_step()

    def _place(self) -> None:
        self.finish_partition(manual_partition(describe(self.module), 1, fixed={}, default=0))
        if state.rank == 0 and self.plan is not None:
            print_plan(self.plan)
        group = state.groups[CommGroup.DP_GROUP]
        if state.cfg.ddp and group.size() > 1:
            self._replicas = Replicas(
                self.module,
                is_local=self.is_local,
                group=group,
                comm_hooks=self._comm_hooks,
                **self._replica_options,
            )

    def _require_step(self, what: str) -> _Step:
        if self._step is None:
            raise SMPError(
                f"DistributedModel.{what} was called outside a step: put the forward and backward of one "
                "batch into a function decorated with @smp.step and call that"
            )
        return self._step


class _Step:
    """One step under way: which microbatch runs, and how many backwards there have been."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.current = 0
        self.backwards = 0  # of all microbatches
        self._before = 0  # of the microbatches before the current one

    def begin(self, microbatch: int) -> None:
        self.current, self._before = microbatch, self.backwards

    def is_last_backward(self) -> bool:
        """Count one backward; true for the last of the last microbatch, if all have equally many."""
        self.backwards += 1
        each = max(1, self._before // self.current) if self.current else 1
        return self.current == self.microbatches - 1 and self.backwards - self._before == each


def _check(module: nn.Module, trace_device: str, trace_execution_times: bool) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.DistributedModel: expected a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, (torch.jit.ScriptModule, DistributedDataParallel, DistributedModel)):
        raise TypeError(
            f"smp.DistributedModel: a {type(module).__name__} cannot be distributed; give the plain module"
        )
    if trace_device not in ("cpu", "gpu"):
        raise ValueError(f"trace_device must be 'cpu' or 'gpu', got {trace_device!r}")
    if trace_execution_times and trace_device == "cpu":
        raise ValueError("trace_execution_times must be False with trace_device='cpu'")
    if state.model is not None:
        raise SMPError("smp.DistributedModel: only one model of a script can be wrapped, and one is already")


def _root_gradient(root: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    if root.numel() != 1:
        raise ValueError(
            f"model.backward: a tensor of shape {tuple(root.shape)} needs an incoming gradient; pass "
            "grad_tensors, or reduce the loss to one element"
        )
    return torch.ones_like(root)
