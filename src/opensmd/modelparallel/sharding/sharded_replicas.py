"""Steps over replicas that split the parameters themselves.

With one partition, torch's FSDP2 gathers a unit when it is called and reduces its gradients when its backward
ends; in steps with several microbatches only the last backward does::

    microbatch 0..m-2   gathered once, gradients add up where they were computed
    microbatch m-1      gradients are reduced and cut, gathered parameters are freed

With several partitions, microbatches take turns, in a different order on every replica. So all units are
gathered before a step and reduced after it, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.replicas.comm_hook import CommHook
from opensmd.modelparallel.replicas.reducer import Replicas
from opensmd.modelparallel.replicas.together import ReplicasTogether
from opensmd.modelparallel.runtime.tensors.tags import put_tag, tag_of
from opensmd.modelparallel.sharding._torch_internals import (
    by_hand,
    drop_gradients,
    gather_root,
    gathered_parameters,
    gradients_found,
    hooked_parameter,
    make_memory,
    reduce_now,
    zeros_where,
)
from opensmd.modelparallel.sharding.sharded_parameters import ShardedParameters

__all__ = ["ShardedReplicas", "refuse_comm_hook"]


def refuse_comm_hook() -> NoReturn:
    """Refuse communication hooks.

    Raises:
        SMPUnsupportedError: always.
    """
    raise SMPUnsupportedError(
        "comm hooks cannot be combined with sharded_data_parallel_degree: gradients are reduced in parts by "
        "torch's FSDP2, not in the buckets of DistributedDataParallel"
    )


class ShardedReplicas(ReplicasTogether):
    """The counterpart of :class:`Replicas` for sharded parameters.

    Args:
        sharded: the parameters that are split over ranks.
        rest: averages the gradients of all others, and sends buffers.
        group: the ranks with the same stage.
        split: whether there are several partitions.
        find_unused_parameters: whether replicas may use different parameters.
    """

    def __init__(
        self,
        sharded: ShardedParameters,
        rest: Sequence[Replicas],
        group: dist.ProcessGroup,
        *,
        split: bool,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__(rest)
        self._sharded = sharded
        self._group = group
        self._split = split
        self._has_memory = False  # whether the memory for gathered parameters exists; it is created once
        for unit in sharded.units:
            if split:
                by_hand(unit)
            elif find_unused_parameters:
                unit.set_reduce_scatter_unused_params(True)

    def before_step(self) -> None:
        """Start a step; with several partitions, gather parameters."""
        for unit in self._sharded.units:
            _require_no_hooks(unit)
        super().before_step()
        if not self._has_memory and torch.is_inference_mode_enabled():
            make_memory(self._sharded.units)
        self._has_memory = True
        if self._split:
            for unit in self._sharded.units:
                unit.unshard()
                _tell_homes(unit)
            return
        gather_root(self._sharded.units[-1])
        if self._sharded.stays_gathered:
            self._reduces(False)

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        """Reduce gradients from now on."""
        super().before_last_backward(roots)
        if not self._split:
            self._reduces(True)

    def abandon_step(self) -> None:
        """Clean up after a step that raised; its gradients are lost."""
        super().abandon_step()
        for unit in self._sharded.units:
            drop_gradients(unit)
        for unit in self._sharded.units if self._split else self._sharded.units[-1:]:
            unit.reset_iter_state()

    def after_step(self, *, backward_ran: bool) -> None:
        """End a step: reduce what no backward has, and free gathered parameters."""
        super().after_step(backward_ran=backward_ran)
        if backward_ran:
            self._reduce_what_is_left()
        for unit in self._sharded.units:
            unit.reshard()

    def join(self, *options: bool) -> NoReturn:
        """Refuse the call.

        Raises:
            SMPUnsupportedError: always.
        """
        raise SMPUnsupportedError(
            "model.join() cannot be combined with sharded_data_parallel_degree: every rank needs the "
            "others' parts of the parameters in each step, so all need equally many"
        )

    def register_comm_hook(self, state: object, hook: CommHook) -> NoReturn:
        """Refuse the call.

        Raises:
            SMPUnsupportedError: always.
        """
        refuse_comm_hook()

    def _reduces(self, wanted: bool) -> None:
        for unit in self._sharded.units:
            unit.set_requires_gradient_sync(wanted, recurse=False)
            unit.set_reshard_after_backward(wanted, recurse=False)
        self._sharded.units[-1].set_is_last_backward(wanted)

    def _reduce_what_is_left(self) -> None:
        gradients = [pair for unit in self._sharded.units for pair in gradients_found(unit)]
        if not self._split and not any(has for _, has in gradients):
            return
        if not gradients:
            return
        device = control_device(self._group)  # the CPU if possible, so that nothing waits for a GPU
        have = torch.tensor([has for _, has in gradients], dtype=torch.uint8, device=device)
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=self._group)
        wanted = {
            id(parameter): bool(has) for (parameter, _), has in zip(gradients, have.tolist(), strict=True)
        }
        self._reduces(True)
        for unit in reversed(self._sharded.units):
            zeros_where(unit, wanted)
            reduce_now(unit)


def _require_no_hooks(unit: FSDPModule) -> None:
    """Refuse hooks that would never run, because backwards only see the gathered parameter.

    Raises:
        SMPUnsupportedError: a sharded parameter has one.
    """
    hooked = hooked_parameter(unit)
    if hooked is not None:
        raise SMPUnsupportedError(
            f"a hook on the gradient of a parameter of shape {tuple(hooked.shape)} would not run, because "
            "sharded_data_parallel_degree has cut it: call register_hook before smp.DistributedModel, which "
            "then leaves the parameter whole, or register_post_accumulate_grad_hook, which gets this rank's "
            "part of the reduced gradient"
        )


def _tell_homes(unit: FSDPModule) -> None:
    """The step function may use a parameter outside of its module, where all ranks must know of it."""
    for sharded, gathered in gathered_parameters(unit):
        tag = tag_of(sharded)
        if tag is not None:
            put_tag(gathered, tag)
