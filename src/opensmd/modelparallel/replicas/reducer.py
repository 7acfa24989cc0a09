"""Data parallelism over the replicas of a pipeline stage, through torch's own reducer.

torch's ``DistributedDataParallel`` is built around the user's whole module and told to ignore what lives on
other stages. Its ``forward`` is never called: the engine runs the microbatches, and announces the start of a
step and of its last backward. In the last backward, the reducer counts gradients and sends each bucket as it
fills, so the reduction overlaps with that backward::

    before_step        buffers from the first replica, and what each replica trains
    microbatch 0..m-2  gradients add up where they are
    before_last_backward   all replicas train the same; the reducer is armed
    microbatch m-1     buckets leave as they fill; the end of this backward waits for them
    after_step         gradients are the replicas' mean (or, without overlap, become it here)

An exception anywhere in between leads to ``abandon_step`` instead of ``after_step``.

The arguments are those documented for ``smp.DistributedModel``;
tests/ranks/replicas/test_hybrid.py checks them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensmd.collectives.gradients.flat import copy_back, flatten, in_buckets
from opensmd.modelparallel.ranks.composite import is_composite, plain_parts
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.replicas._torch_internals import (
    DistributedStage,
    arm,
    begin,
    begin_again,
    dismantle,
    has_finished,
    ignoring,
    is_joining,
)
from opensmd.modelparallel.replicas.comm_hook import CommHook
from opensmd.modelparallel.replicas.trained_alike import TrainedAlike

__all__ = ["Replicas"]

MEBIBYTE = 1 << 20


class Replicas:
    """The replicas of this rank's stage.

    The constructor broadcasts the local parameters and buffers from the group's first rank.
    ``smp.DistributedModel`` defers that to the first step.

    Args:
        module: the user's whole module, already placed.
        is_local: whether the parameter or buffer of this full name lives on this rank.
        group: the ranks with the same stage.
        alike: compares what all ranks train whose gradients depend on each other; None if another does.
        has_data: whether the data of a buffer that all stages had at first is still on this rank.
        bucket_cap_mb: bucket size in MiB.
        broadcast_buffers: send the first replica's buffers to the others at the start of every step.
        gradient_as_bucket_view: let gradients be views of the buckets.
        find_unused_parameters: look for parameters that the last backward does not reach.
        overlapping_allreduce: send buckets during the last backward; otherwise all gradients after the step.
        backward_passes_per_step: how many steps' gradients add up before they are reduced.
        equal: broadcast, as described above; False if the replicas are already equal.
        comm_hooks: ``(state, hook)`` pairs that were registered before partitioning.

    Raises:
        ValueError: a comm hook without ``overlapping_allreduce``, or ``backward_passes_per_step`` below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_local: Callable[[str], bool],
        group: dist.ProcessGroup,
        alike: TrainedAlike | None = None,
        has_data: Callable[[Tensor], bool] = lambda _: True,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        equal: bool = True,
        comm_hooks: Sequence[tuple[Any, CommHook]] = (),
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
        self.group = group
        self.overlapping = overlapping_allreduce
        self.backward_passes_per_step = backward_passes_per_step
        self.bucket_bytes = int(bucket_cap_mb * MEBIBYTE)
        self._module = module
        self._is_local = is_local
        self._has_data = has_data
        self._broadcast_buffers = broadcast_buffers
        self._passes = 0
        self._inside = False
        self._armed = False
        self._announced = False
        self._alike = alike
        self._reductions = 0  # by this reducer of torch's
        self._comm_hooks: list[tuple[Any, CommHook]] = []
        self._ddp_options: dict[str, Any] = {
            "process_group": group,
            "bucket_cap_mb": bucket_cap_mb,
            "forward_sync_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view and overlapping_allreduce,
            "find_unused_parameters": find_unused_parameters,
        }
        self._local = [parameter for name, parameter in module.named_parameters() if is_local(name)]
        self._trained = [parameter.requires_grad for parameter in self._local]
        self._ddp: DistributedDataParallel | None = None
        if self._parameters:
            self._ddp = self._make_ddp(first=equal)
        elif equal:
            self._send_from_first([*module.parameters(), *module.buffers()])
        for state, hook in comm_hooks:
            self.register_comm_hook(state, hook)

    def before_step(self) -> None:
        """Start a step: synchronise buffers and decide whether its gradients are reduced.

        Raises:
            SMPError: replicas train different parameters.
            RuntimeError: parameters were frozen or unfrozen within :meth:`join`.
        """
        if self._inside:
            raise RuntimeError("a step began before the previous one had ended")
        changed = [parameter.requires_grad for parameter in self._local] != self._trained
        self._begin_comparing(changed=changed)
        if changed:
            self._follow_requires_grad()
        self._inside, self._announced = True, False
        if self._ddp is None:
            if self._broadcast_buffers:
                self._send_from_first(list(self._module.buffers()))
            return
        begin(self._ddp, reduce=self.overlapping and self._is_reducing)

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        """Arm the reducer. From here to the end of the backward of ``roots`` no other backward may run.

        With a single microbatch, nobody can know which of its backwards will be the last, so each is
        announced. Each averages the sum of gradients again, which does not change those that are already
        averaged.

        Args:
            roots: everything that the last backward on this rank starts from, including tokens of sent
                tensors.

        Raises:
            SMPError: replicas train different parameters.
        """
        self._compare()
        if self._ddp is not None and self.overlapping:
            if self._announced:
                begin_again(self._ddp)
            self._armed = self._announced = True
            arm(self._ddp, roots)

    def after_backward(self) -> None:
        """Note that a backward has returned; if it was the announced one, the gradients have been reduced.

        An exception later in the step leaves torch's reducer as it is, on this replica as on the others,
        which may not have met it.
        """
        self._armed = False

    def abandon_step(self) -> None:
        """Clean up after a step that raised; it does not count towards ``backward_passes_per_step``.

        This sends nothing, so it may be called on one replica alone. If the exception came in the last
        backward, torch's reducer still waits for that backward's gradients, and is replaced. Replicas can
        continue together only if the same exception has ended the step on all of them; otherwise the others
        wait for this one's gradients until the group's timeout. Not within :meth:`join`.
        """
        self._inside = False
        if self._armed and self._ddp is not None:
            self._armed = False
            self._replace_ddp()

    def after_step(self, *, backward_ran: bool) -> None:
        """End a step; without overlap, reduce the gradients now.

        Raises:
            SMPError: replicas train different parameters.
            RuntimeError: backwards ran, but the last microbatch did not announce its own, or that did not
                reach all parameters.
        """
        self._inside = self._armed = False
        if not backward_ran:
            return
        self._compare()
        if self._ddp is not None and self._is_reducing:
            self._finish_reduction(self._ddp)
            self._reductions += 1
        self._passes += 1

    def close(self) -> None:
        """Stop reducing, so that other replicas can take over; called between steps."""
        if self._ddp is not None:
            dismantle(self._ddp)
            self._ddp = None

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """Let replicas run different numbers of steps, like torch's ``DistributedDataParallel.join``.

        All stages of a replica must leave it after the same number of steps.

        Raises:
            RuntimeError: ``overlapping_allreduce`` is off, so there are no reducer calls to match.
        """
        if not self.overlapping and enable:
            raise RuntimeError("model.join() needs overlapping_allreduce=True")
        if self._ddp is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._ddp.join(
            divide_by_initial_world_size, enable, throw_on_early_termination
        )
        return context

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Replace the all-reduce of a bucket (torch's DDP communication hooks).

        Raises:
            ValueError: ``overlapping_allreduce`` is off.
        """
        if not self.overlapping:
            raise ValueError("a comm hook needs overlapping_allreduce=True: without it no bucket is sent")
        if self._ddp is not None:
            self._ddp.register_comm_hook(state, hook)
        self._comm_hooks.append((state, hook))

    @property
    def _is_reducing(self) -> bool:
        return (self._passes + 1) % self.backward_passes_per_step == 0

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are reduced."""
        return [parameter for parameter, trained in zip(self._local, self._trained, strict=True) if trained]

    def _without_gradient(self) -> str:
        names = [
            name
            for name, parameter in self._module.named_parameters()
            if self._is_local(name) and parameter.requires_grad and parameter.grad is None
        ]
        return f" ({len(names)} have no gradient: {', '.join(names[:3])})" if names else ""

    def _begin_comparing(self, *, changed: bool) -> None:
        """Tell the other replicas what this step trains, if it does.

        One replica alone may run steps that evaluate. What they say is waited for where replicas meet anyway:
        before buffers are sent, or torch's reducer settles its buckets, which it does after its first
        reduction. Elsewhere it arrives long before it is needed.
        """
        joining = self._ddp is not None and is_joining(self._ddp)
        if self._alike is None or joining or not (self._module.training and torch.is_grad_enabled()):
            return
        sends_buffers = self._broadcast_buffers and (self._ddp is None or bool(self._ddp.modules_buffers))
        if changed or sends_buffers or self._alike.at_once or self._reductions < 2:
            self._alike.compare()
        else:
            self._alike.begin()

    def _compare(self) -> None:
        if self._alike is not None:
            self._alike.end()

    def _follow_requires_grad(self) -> None:
        """Adapt to changes of ``requires_grad``, which torch's reducer reads only when it is created."""
        if self._ddp is not None and is_joining(self._ddp):
            raise RuntimeError(
                "requires_grad of parameters changed within join(): the replicas that have ended would not "
                "follow. Freeze and unfreeze parameters before or after it"
            )
        if self._ddp is not None and self._passes % self.backward_passes_per_step:
            self._reduce_now()  # earlier passes' gradients: no reducer will handle a frozen parameter
        self._trained = [parameter.requires_grad for parameter in self._local]
        self._replace_ddp()

    def _replace_ddp(self) -> None:
        if self._ddp is not None:
            dismantle(self._ddp)
        self._ddp = self._make_ddp(first=False) if self._parameters else None
        if self._ddp is not None:
            for state, hook in self._comm_hooks:
                self._ddp.register_comm_hook(state, hook)

    def _make_ddp(self, *, first: bool) -> DistributedDataParallel:
        """Create torch's reducer for what lives here; the ``first`` one makes all replicas equal."""
        # It cannot send composite parameters, and need not if they are not trained.
        composite = {
            name: tensor
            for name, tensor in _tensors(self._module)
            if self._is_local(name) and is_composite(tensor) and not tensor.requires_grad
        }
        if first:
            self._send_from_first(list(composite.values()))
        self._reductions = 0
        elsewhere = [name for name, _ in _tensors(self._module) if not self._is_local(name)]
        with ignoring(self._module, [*elsewhere, *composite]):
            return DistributedStage(
                self._module, has_data=self._has_data, init_sync=first, **self._ddp_options
            )

    def _send_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast what this stage has but no reducer handles."""
        local = {
            id(buffer_or_parameter)
            for name, buffer_or_parameter in _tensors(self._module)
            if self._is_local(name) and self._has_data(buffer_or_parameter)
        }
        for tensor in tensors:
            if id(tensor) in local:
                for part in plain_parts(tensor):
                    dist.broadcast(part.detach(), group=self.group, group_src=0)

    def _finish_reduction(self, ddp: DistributedDataParallel) -> None:
        """Reduce what the step's last backward has not; raise if there was no complete announced one."""
        if not self.overlapping:
            self._reduce_now()
        elif not self._announced and ddp.find_unused_parameters:
            self._reduce_without_backward(ddp)
        elif not self._announced:
            raise RuntimeError(
                "the gradients of this step were not averaged over the replicas: their reduction begins "
                "with the last microbatch's backward, and it ran none on this stage, or fewer than the "
                "others. Call model.backward equally often in every microbatch; if a loss does not "
                "depend on this stage's parameters, use find_unused_parameters=True; or use "
                "overlapping_allreduce=False"
            )
        elif not has_finished(ddp):
            raise RuntimeError(
                "the gradients of this step were not averaged over the replicas: the last backward did "
                f"not reach all parameters of this stage{self._without_gradient()}. Use "
                "smp.DistributedModel(..., find_unused_parameters=True), freeze what is not trained with "
                "requires_grad_(False), or use overlapping_allreduce=False"
            )

    def _reduce_without_backward(self, ddp: DistributedDataParallel) -> None:
        """Reduce the gradients of earlier microbatches if the last one's backward has not reached this stage.

        It may have reached the same stage of other replicas, so the reducer itself must take part.
        """
        nothing = _Nothing.apply(self._parameters[0])  # type: ignore[no-untyped-call]
        arm(ddp, [nothing])
        torch.autograd.backward(nothing)

    def _reduce_now(self) -> None:
        """Average all gradients; a gradient that only some replicas have counts as zero in the others."""
        found = [parameter.grad is not None for parameter in self._parameters]
        # On the CPU if the group carries its tensors, so that nothing waits for a GPU.
        have = torch.tensor(found, dtype=torch.uint8, device=control_device(self.group))
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=self.group)
        gradients = []
        for parameter, wanted in zip(self._parameters, have.tolist(), strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        replicas = dist.get_world_size(self.group)
        for bucket in in_buckets(gradients, self.bucket_bytes):
            flat = flatten(bucket)
            flat /= replicas
            dist.all_reduce(flat, group=self.group)
            copy_back(flat, bucket)


class _Nothing(torch.autograd.Function):
    """Reaches a parameter in backward without changing its gradient, even if that is None."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
