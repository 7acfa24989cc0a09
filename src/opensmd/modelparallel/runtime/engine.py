"""The engine of one rank: opened with a placed model, it runs steps until it is closed or poisoned."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.planning.measured import StageTimes
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.schedules.tables import Table
from opensmd.modelparallel.ranks.first_rank import from_first_rank
from opensmd.modelparallel.ranks.poisoned_groups import require_sound
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.backward_pass import Reducer
from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning
from opensmd.modelparallel.runtime.calls.inner_hooks import InnerHooks
from opensmd.modelparallel.runtime.calls.interception import current_run
from opensmd.modelparallel.runtime.messages.message import SentTensor
from opensmd.modelparallel.runtime.messages.opening import open_transport
from opensmd.modelparallel.runtime.messages.step_inputs import StepInputs, agreed_inputs
from opensmd.modelparallel.runtime.messages.transport import Transport
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.placed_model import PlacedModel
from opensmd.modelparallel.runtime.side_effects.escaped import EscapedTensors
from opensmd.modelparallel.runtime.side_effects.random_numbers.script_generators import ScriptRandom
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import (
    ReplicatedRandom,
    seed_of_step,
)
from opensmd.modelparallel.runtime.step_errors import StepErrors
from opensmd.modelparallel.runtime.step_run import StepRun
from opensmd.modelparallel.runtime.step_timeline import StepTimeline
from opensmd.modelparallel.runtime.tensors.structure import Arguments
from opensmd.modelparallel.runtime.turns.adaptive_schedule import AdaptiveSchedule
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule
from opensmd.modelparallel.runtime.turns.record import Record, Stretch
from opensmd.modelparallel.runtime.turns.threads import Threads
from opensmd.modelparallel.settings.config import Config
from opensmd.timeline.recorder import recorder

__all__ = ["Engine", "first_inputs"]


def first_inputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
) -> StepInputs:
    """Return what the first step begins with, agreed over ``group`` as by :meth:`Engine.agreed_inputs`.

    Raises:
        SMPError: a step of an earlier engine failed on the same group.
    """
    require_sound(group)
    return agreed_inputs(function, args, kwargs, group, control_device(group), seed=seed_of_step(), modes=0)


class Engine:
    """Places a model over the ranks of a pipeline group, and runs microbatches on it.

    Args:
        group: the pipeline's ranks, in the order of the stages.
        config: the settings.
        module: the model; this rank frees the memory of what lives elsewhere.
        plan: where everything lives.
        sum_warning: sees every backward of torch's own.
        offloading: that of checkpointed activations; None keeps them in memory.
        across: returns the groups in which ranks of other pipelines may wait for this one.

    Attributes:
        plan: where everything lives.
        reducer: that of the replicas, once there are any.
        errors: those of its steps.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: Config,
        module: nn.Module,
        plan: Plan,
        sum_warning: SumWarning,
        offloading: Offloading | None,
        across: Callable[[], Iterable[dist.ProcessGroup]],
    ) -> None:
        self.reducer: Reducer | None = None
        self._seed = 0
        self._group = group
        self._config = config
        self._sum_warning = sum_warning
        self._control_device = control_device(group)
        self._threads = Threads()
        self._record = Record()
        self._offloading = offloading
        self._across = across
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        placed = PlacedModel(module, plan, self._rank)
        random = ReplicatedRandom(placed.generators)
        self._follow(placed, open_transport(group, placed.device), random)
        self.errors = self._new_errors()
        atexit.register(self.close)

    def follow(self, module: nn.Module, plan: Plan) -> None:
        """Switch to another plan; between steps, on all ranks.

        Args:
            module: the model, with the data of what lives here by ``plan``.
        """
        before = self._context
        before.transport.flush()
        placed = PlacedModel(module, plan, self._rank)
        self._follow(placed, before.transport, before.random)
        self._context.begun = before.begun

    def follow_group(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Switch to other groups; between steps or after a failed one, on all ranks of ``group``.

        Args:
            module: the model, whose parts stay where they are.
            group: the pipeline's ranks, in their previous positions.
        """
        before = self._context
        # Threads of a failed step may still be ending.
        self._threads.close()
        self._threads = Threads()
        before.transport.close()
        self._group, self._control_device = group, control_device(group)
        placed = PlacedModel(module, self.plan, self._rank)
        self._follow(placed, open_transport(group, placed.device), before.random)
        self._context.begun = before.begun
        self.errors = self._new_errors()

    def follow_times(self, measured: Sequence[StageTimes]) -> None:
        """Adapt the order of work to a microbatch's times on each stage; on all ranks alike."""
        self._schedule.follow_times(measured)

    def _follow(self, placed: PlacedModel, transport: Transport, random: ReplicatedRandom) -> None:
        self.plan = placed.plan
        self._timeline = StepTimeline(recorder(dist.get_rank()), placed.plan, self._rank)
        self._placed = placed
        self._context = PipelineContext(
            rank=self._rank,
            size=self._size,
            transport=transport,
            random=random,
            script_random=ScriptRandom(self._rank),
            buffers=placed.buffers,
            escaped=EscapedTensors(placed.parameters, placed.replicated_memory),
            trained=placed.trained,
            placed_memory=placed.placed_memory,
            replicated_memory=placed.replicated_memory,
            divided=placed.divided,
            sum_warning=self._sum_warning,
            offloading=self._offloading,
        )
        self._inner_hooks = InnerHooks(placed.module, placed.plan, self._context.escaped)
        self._schedule = AdaptiveSchedule(self._planned_schedule())

    def _planned_schedule(self) -> RankSchedule:
        config = self._config
        return RankSchedule(
            plan=self.plan,
            stage=self._rank,
            partitions=self._size,
            pipeline=config.pipeline,
            active_microbatches=config.active_microbatches,
            in_order=self._context.transport.ordered or config.fixed_order,
            virtual_stages=config.virtual_stages,
            common=self._first_ranks,
        )

    def _new_errors(self) -> StepErrors:
        """Create the errors of steps over these groups, with no failure yet."""
        context = self._context
        return StepErrors(
            self._group,
            context.transport,
            context.others,
            self._across,
            in_order=self._schedule.in_order,
        )

    @property
    def tells_times(self) -> bool:
        """Whether a step's record shows how long this rank's work takes.

        Accelerators continue after a call has returned, and in a fixed order, waits are part of the work.
        """
        return self._placed.device.type == "cpu" and not self._schedule.in_order

    def times_of_microbatches(self) -> list[StageTimes]:
        """Return what each microbatch has taken on this rank in the latest step."""
        forwards, backwards, weights = map(self._record.spent, ("forward", "backward", "weights"))
        return [
            StageTimes(
                forward * 1e-9,
                (backwards.get(index, 0) + weights.get(index, 0)) * 1e-9,
                weights[index] * 1e-9 if index in weights else None,
            )
            for index, forward in forwards.items()
        ]

    @property
    def record(self) -> list[Stretch]:
        """What this rank did in the latest step."""
        return self._record.stretches

    @property
    def sent(self) -> list[SentTensor]:
        """The tensors and gradients that this rank sent in the latest step."""
        stretches = self._record.stretches
        begin = stretches[0].start_ns if stretches else 0
        return [message for message in self._context.transport.sent() if message.at_ns >= begin]

    def close(self) -> None:
        """Wait until everything sent has left, because the process may end, and end the idle threads."""
        if not self.errors:
            with contextlib.suppress(RuntimeError):  # the group may be gone
                self._context.transport.flush()
        self._context.transport.close()
        self._threads.close()
        atexit.unregister(self.close)

    def agreed_inputs(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepInputs:
        """Return what a step begins with, the same on all ranks: the first rank's if they differ.

        Raises:
            SMPError: an earlier step failed, here or on another rank; or ranks disagree on what is trained.
        """
        self.errors.require_none()
        transport = self._context.transport
        with self.errors.alike(confirm=False):
            transport.require_no_abort()
            try:
                inputs = agreed_inputs(
                    function,
                    args,
                    kwargs,
                    self._group,
                    self._control_device,
                    seed=seed_of_step(),
                    modes=self._placed.modes.number(),
                )
            except RuntimeError:
                with contextlib.suppress(DistBackendError):
                    transport.require_no_abort()  # it may know the cause
                raise
        # Outside: nothing of the step has been sent, so that an error about modes leaves the group usable.
        if inputs.same_modes:
            self._placed.modes.have_agreed()
        else:
            self._placed.modes.follow_homes(self._group)
        return inputs

    def begin_modes(self) -> None:
        """Agree on what hooks have frozen and switched since the model was placed; on all ranks."""
        self._placed.modes.number()
        self._placed.modes.follow_homes(self._group)

    def seed_step(self, seed: int) -> None:
        """Set what the next step's random numbers follow from that all ranks draw alike."""
        self._seed = seed

    def run(
        self, function: Callable[..., Any], calls: Sequence[Arguments], *, detach: bool, backwards: Backwards
    ) -> list[Any]:
        """Run ``function`` once for each of ``calls``; tensors in the results are real on every rank.

        Args:
            detach: detach what is returned from its graph.
            backwards: counts the backwards.

        Raises:
            SMPError: another rank failed or was lost; the message names it and what this rank waited for.
            Exception: what ``function`` raised on this rank.
        """
        self._begin_step(len(calls))
        step = StepRun(
            self._context,
            self._placed,
            self._schedule,
            function,
            calls,
            detach=detach,
            backwards=backwards,
            threads=self._threads,
            reducer=self.reducer,
        )
        self._record = step.record
        try:
            with self._inner_hooks.watched():
                results = step.run()
            self._schedule.step_has_ended(len(calls), step.record)
            return results
        except BaseException as error:
            self.errors.add(error, step.failed_at)
            step.abandon()
            raise
        finally:
            self._timeline.add(step.record, len(calls))

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None,
        retain_graph: bool | None,
        *,
        share: float,
    ) -> None:
        """Run ``torch.autograd.backward`` over all ranks, for the calling thread's microbatch.

        Args:
            share: the factor for gradients.

        Raises:
            SMPError: called from a module that runs as a whole on one rank.
        """
        run = current_run()
        if run is None:
            raise SMPError(
                "model.backward was called inside a module that lives on one partition, where the other "
                "partitions cannot take part: call it in the step function"
            )
        run.backward_pass.begin(run.microbatch, tensors, grad_tensors, retain_graph, share=share)

    def _begin_step(self, microbatches: int) -> None:
        self._placed.require_no_backward_hooks()
        transport = self._context.transport
        if transport.ordered:  # the previous step's sends are kept until then, and have been received
            transport.flush()
            self._context.sent_since_flush = False
        alone = microbatches == 1 or self._config.active_microbatches == 1
        self._placed.trained.begin_step(self._placed.modes.trained, may_change=alone and self.reducer is None)
        self._context.random.begin_step(self._seed)
        mode = (self._placed.module.training, torch.is_grad_enabled())
        self._context.script_random.begin_step(mode, self._seed)
        self._context.borrowed.clear()

    def _first_ranks(self, search: Callable[[], Table]) -> Table:
        """Return what the first rank finds; only it searches, because ranks may share cores."""
        return from_first_rank(
            search, self._group, does="searches for a schedule", could_not="find a schedule"
        )
