"""``smp.DistributedModel``: the wrapper that runs a model inside steps.

The first step partitions the model: rank 0 makes a plan from one dry run, and every rank keeps its part. Then
pending state dicts are loaded, the replicas are made equal, and the hooks run. With one partition nothing is
intercepted; the microbatches run one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.collectives.gradients.buckets import require_bucket_size
from opensmd.modelparallel.activation_checkpointing import checkpoint_layers
from opensmd.modelparallel.compatibility.left_behind import LeftBehind
from opensmd.modelparallel.compatibility.own_hashes import hash_by_identity
from opensmd.modelparallel.delayed.delayed_parameter import goes_on
from opensmd.modelparallel.dry_run.capture import is_tracing
from opensmd.modelparallel.dry_run.first_plan import FirstPlan, PlanRequest, agree_on_plan
from opensmd.modelparallel.elastic.regrouped_model import RegroupedModel
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.model_arguments import (
    refuse_elastic,
    require_data,
    require_elastic,
    require_model,
    require_passes,
    require_tracing,
    warn_of_untraced,
)
from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.precision.half_module import narrowed, to_half, widened
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replan.plan_check import PlanCheck
from opensmd.modelparallel.replicas._torch_internals import NotForDDP
from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.replicas.comm_hook import CommHook, averaging_hook
from opensmd.modelparallel.report.table import print_plan
from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning
from opensmd.modelparallel.runtime.calls.checkpoints_of_torch import offloading_of_all_checkpoints
from opensmd.modelparallel.runtime.engine import Engine, first_inputs
from opensmd.modelparallel.runtime.late_parameters import PlacedParameters
from opensmd.modelparallel.runtime.same_model import require_same_model
from opensmd.modelparallel.runtime.step_errors import Explained
from opensmd.modelparallel.runtime.tensors.structure import Arguments
from opensmd.modelparallel.runtime.whole_model import WholeModel
from opensmd.modelparallel.sharding.placing import shard_at_wrapping, shard_parameters
from opensmd.modelparallel.state import state as smp_state
from opensmd.modelparallel.state_dicts.not_copied import NotCopied
from opensmd.modelparallel.tensor_parallel.replacement import distribute
from opensmd.modelparallel.tensor_parallel.same_batch import begin_alike

__all__ = ["DistributedModel", "StepCall"]


class StepCall(NamedTuple):
    """A call of a step function.

    Attributes:
        function: the user's.
        args, kwargs: what it was called with.
        split: cuts these into arguments for each microbatch.
        detach: whether to detach what it returns from its graph.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    split: Callable[[tuple[Any, ...], dict[str, Any]], list[Arguments]]
    detach: bool


class DistributedModel(NotForDDP, RegroupedModel, NotCopied):
    """A module whose forward and backward run inside ``smp.step`` functions.

    Args:
        module: the model; not a ScriptModule and not wrapped in DistributedDataParallel.
        trace_device: where a timed dry run takes place, ``"gpu"`` or ``"cpu"``.
        trace_execution_times: measure times for the plan in real runs (not with ``trace_device="cpu"``).
            None: time the operations of the dry run where that may gain something; False: nothing.
        overlapping_allreduce: send gradients to the replicas during the last microbatch's backward.
        backward_passes_per_step: how many steps add up their gradients before the replicas reduce them.
        average_grads_across_microbatches: divide gradients by the number of microbatches.
        bucket_cap_mb: size of gradient buckets in MiB.
        trace_memory_usage: measure what is kept for backward in a real run instead of a fake one.
        broadcast_buffers: send the first replica's buffers to the others in each step.
        gradient_as_bucket_view: let gradients be views of the buckets.
        find_unused_parameters: look for parameters that the last backward does not reach.

    Raises:
        SMPNotInitializedError: before ``smp.init``.
        SMPError: the script has already wrapped a model.
        TypeError, ValueError: a bad argument.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool | None = None,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        smp_state.require("smp.DistributedModel")
        require_model(module)
        hash_by_identity(module)
        require_tracing(trace_device, trace_execution_times)
        require_passes(backward_passes_per_step)
        require_bucket_size(bucket_cap_mb, "smp.DistributedModel")
        require_elastic(backward_passes_per_step, gradient_as_bucket_view=gradient_as_bucket_view)
        half = smp_state.cfg.half_dtype
        checkpoint_layers(module, smp_state.checkpointed_layers)
        replaced = LeftBehind(module)
        with goes_on(module) as root:
            root.add_module("module", distributed := distribute(module))
            replaced.leave_out(distributed)
            if half is not None:
                to_half(distributed, half)
        super().__init__(distributed)
        self._replaced = replaced
        self._half = half
        self._levels = 1 if half is None else 2
        if smp_state.cfg.offload_activations:
            smp_state.offloading = Offloading.asked_for(smp_state.cfg.activation_loading_horizon)
        self._traces_times, self._traces_memory = trace_execution_times, trace_memory_usage
        self._trace_device = trace_device
        self._average = average_grads_across_microbatches
        self._comm_hooks = []
        self._engine = self._runner = self._replicas = None
        self._placed: PlacedParameters | None = None
        self._plan_check = self._known_plan = None
        self._replica_options = {
            "overlapping_allreduce": overlapping_allreduce,
            "backward_passes_per_step": backward_passes_per_step,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
        }
        self._backwards: Backwards | None = None  # of the running step
        self._sum_warning = SumWarning(is_due=self._average and smp_state.rank == 0)
        self._joins_from_first_step: Callable[[], None] | None = None
        self.joining = False
        self._sharded = None
        smp_state.model = self
        if shard_at_wrapping():
            self._place(lambda: None)

    @property
    def running(self) -> int:
        """The number of microbatches of the step that runs; 0 outside steps."""
        return 0 if self._backwards is None else self._backwards.microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a step."""
        if self._backwards is None and not is_tracing() and not self._runs_anywhere:
            self._refuse("forward")
        module: nn.Module = self._modules["module"]  # type: ignore[assignment]  # quicker than get_module()
        if self._half is None:
            return module(*args, **kwargs)
        narrow = narrowed(args, self._half), narrowed(kwargs, self._half)
        return widened(module(*narrow[0], **narrow[1]), self._half)

    @property
    def _runs_anywhere(self) -> bool:
        """Whether the model may be called outside steps: it has one partition, and ranks share tensors."""
        cfg = smp_state.cfg
        return cfg.pipeline_parallel_degree == 1 and cfg.tensor_parallel_degree > 1

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Replace ``loss.backward()`` and ``torch.autograd.backward(tensors, grad_tensors)``.

        Args:
            tensors: a loss, or tensors with their incoming gradients.
            grad_tensors: one per tensor; None for tensors of one element.
            retain_graph: keep the graph for another backward of the same microbatch.
            create_graph: not supported.

        Raises:
            SMPUnsupportedError: with ``create_graph``.
            SMPError: outside a step.
        """
        if create_graph:
            raise SMPUnsupportedError(
                "model.backward does not support create_graph: second derivatives do not cross partitions. "
                "Compute them in an nn.Module that lives on one partition"
            )
        if self._backwards is None or self._runner is None:
            if is_tracing():
                torch.autograd.backward(tensors, grad_tensors, retain_graph)
                return
            self._refuse("backward")
        share = 1 / self._backwards.microbatches if self._average else 1.0
        if smp_state.loss_scale is not None:
            share *= smp_state.loss_scale.apply()
        self._runner.backward(tensors, grad_tensors, retain_graph, share=share)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let replicas run different numbers of steps, like torch's ``DistributedDataParallel.join``.

        It may include the first step, which every replica must run. With a single replica it does nothing.
        The arguments are torch's.

        Raises:
            SMPError: without data parallelism or with elastic replicas; or at the end, on a rank that has
                never run a step.
        """
        refuse_elastic("join")
        if not smp_state.cfg.ddp:
            raise SMPError(
                "model.join() makes replicas wait for each other, of which there is one without ddp=True"
            )
        options = (divide_by_initial_world_size, enable, throw_on_early_termination)
        self.joining = True
        with contextlib.ExitStack() as joined:
            if self.partitioned:
                self._enter_join(joined, options)
            else:
                self._joins_from_first_step = lambda: self._enter_join(joined, options)
            try:
                yield
                if not self.partitioned and smp_state.groups[CommGroup.DP_GROUP].size() > 1:
                    raise SMPError(
                        "model.join() ended before the first step, in which the replicas meet: each needs "
                        "at least one step"
                    )
            finally:
                self._joins_from_first_step = None
                self.joining = False

    def _enter_join(self, joined: contextlib.ExitStack, options: tuple[bool, bool, bool]) -> None:
        if self._replicas is not None:
            joined.enter_context(self._replicas.join(*options))

    def register_comm_hook(self, state: object, callable: CommHook) -> None:
        """Replace the reduction of gradient buckets, as torch's ``register_comm_hook`` does.

        A hook of the script gets sums over the microbatches, and averages over these and the replicas. Hooks
        of ``torch.distributed`` and ``opensmd``, given as they are, get the means over microbatches.

        Args:
            state: passed to every call of the hook.
            callable: takes ``state`` and a ``GradBucket``; returns a future of the bucket's reduced tensor.

        Raises:
            SMPError: there is no data parallelism, or replicas are elastic.
        """
        refuse_elastic("register_comm_hook")
        if not smp_state.cfg.ddp:
            raise SMPError("a comm hook needs ddp=True: without it nothing is sent between replicas")
        hook = averaging_hook(callable, smp_state.cfg.microbatches if self._average else 1)
        self._comm_hooks.append((state, hook))
        if self._replicas is not None:
            self._replicas.register_comm_hook(state, hook)

    def run_step(self, call: StepCall) -> list[Any]:
        """Run one step; used by ``smp.step``.

        Returns:
            What the function returned for each microbatch, with real tensors on every rank.
        """
        work, elastic = partial(self._run_step, call), smp_state.elastic
        results: list[Any] = work() if elastic is None else elastic.carry_out(work, "a smp.step function")
        self.finish_step()
        return results

    def _run_step(self, call: StepCall) -> list[Any]:
        self._require_ready()
        function, pipeline = call.function, smp_state.groups[CommGroup.PP_GROUP]
        args, kwargs, seed = self._agreed_inputs(call, pipeline)
        seed = begin_alike(function, args, kwargs, seed)
        calls = call.split(args, kwargs)
        first = not self.partitioned
        if first:
            with Explained(function, "while the model was planned and placed", pipeline):
                self.follow_inputs(calls[0])
                self._place(partial(function, *calls[0][0], **calls[0][1]))
        elif self._placed is not None:
            self._placed.require_no_others()
        if self._engine is None:
            results = self._run_placed(call, calls)
        else:
            with (
                Explained(function, "before or after its microbatches", pipeline),
                self._engine.errors.alike(confirm=first),
            ):
                self._engine.seed_step(seed)
                results = self._run_placed(call, calls)
        if first and smp_state.offloading is not None:
            smp_state.offloading.warn_if_idle()
        return results

    def _require_ready(self) -> None:
        if self._backwards is not None or is_tracing():
            raise SMPError("a smp.step function was called inside another one; call them one after the other")
        if self._is_half_placed:
            raise SMPError(
                "an earlier step failed while the model's parts got their places, so that what was to follow "
                "is missing, such as the average over replicas: begin again with smp.shutdown, smp.init and "
                "a new model"
            )
        if self.gathered:
            raise SMPError(
                "model.cpu() has put the whole model on every rank; it cannot run in steps any more, only as "
                "plain PyTorch through model.get_module()"
            )

    def _agreed_inputs(
        self, call: StepCall, pipeline: dist.ProcessGroup
    ) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return the arguments and the seed with which all ranks of the pipeline begin the step."""
        if pipeline.size() == 1:
            return call.args, call.kwargs, 0
        with Explained(call.function, "while the ranks agreed on its arguments", pipeline):
            if self._engine is None:
                (args, kwargs), seed, _ = first_inputs(call.function, call.args, call.kwargs, pipeline)
            else:
                (args, kwargs), seed, _ = self._engine.agreed_inputs(call.function, call.args, call.kwargs)
                self._compare_with_plan(self._engine)
        return args, kwargs, seed

    def _run_placed(self, call: StepCall, calls: list[Arguments]) -> list[Any]:
        """Run a step of a placed model."""
        if smp_state.elastic is not None:
            smp_state.elastic.keep(self)
        if smp_state.scalers:  # iterating over weak references is slow, even over none
            for scaler in smp_state.scalers.values():
                scaler.follow_owners()
        if self._replicas is not None:
            self._replicas.before_step()
        assert self._runner is not None  # set when the model was placed
        # Bypasses the __setattr__ of nn.Module, which takes longer than everything else here.
        self.__dict__["_backwards"] = backwards = Backwards(len(calls))
        try:
            with offloading_of_all_checkpoints(smp_state.offloading):
                results = self._runner.run(call.function, calls, detach=call.detach, backwards=backwards)
        except BaseException:
            if self._replicas is not None:
                self._replicas.abandon_step()
            raise
        finally:
            self.__dict__["_backwards"] = None
        if self._replicas is not None:
            self._replicas.after_step(backward_ran=backwards.total > 0)
        if self._plan_check is not None and backwards.total and not self.joining:
            self._plan_check.step_has_ended()
        return results

    def _place(self, call: Callable[[], Any]) -> None:
        require_data(self.get_module())
        require_same_model(self.get_module(), smp_state.groups.messages, sliced=self.shards)
        request = PlanRequest(
            module=self.get_module(),
            call=call,
            cfg=smp_state.cfg,
            optimizer=smp_state.optimizer,
            device=torch.device("cpu") if self._trace_device == "cpu" else None,
            has_data=not self.delayed,
            times=self._traces_times,
            memory=self._traces_memory,
            saved=self.places_of_waiting(),
        )
        with self.delayed.planned():
            first = agree_on_plan(request, smp_state.groups.messages)
        with torch.inference_mode(False):  # the first step may be an evaluation, but later ones train
            self._place_by(first)
            self._make_replicas()
            smp_state.follow_model()  # every replica now has the first one's values
            if self._joins_from_first_step is not None:
                self._joins_from_first_step()

    def _place_by(self, first: FirstPlan) -> None:
        self._is_half_placed = True
        self._known_plan = plan = first.plan
        pipeline = smp_state.groups[CommGroup.PP_GROUP]
        if smp_state.cfg.shards_parameters:
            self._sharded = shard_parameters(self, plan)
        else:
            self._fill_delayed(plan)
        if pipeline.size() == 1:
            is_sharded = self._sharded is not None
            self._runner = WholeModel(self.get_module(), self._sum_warning, is_sharded=is_sharded)
        else:
            self._runner = self._engine = smp_state.engine = Engine(
                pipeline,
                smp_state.cfg,
                self.get_module(),
                plan,
                self._sum_warning,
                smp_state.offloading,
                across=lambda: smp_state.groups.across_pipelines(),
            )
            self._plan_check = PlanCheck(first, self._engine, smp_state.cfg, smp_state.groups)
        if self._traces_times or self._traces_memory:
            warn_of_untraced(split=self._engine is not None, by_hand=not smp_state.cfg.auto_partition)
        self.finish_partition(plan)
        if self._engine is not None:
            self._engine.begin_modes()
        if smp_state.rank == 0:
            print_plan(plan)
        may_have_replicas = smp_state.groups.size(CommGroup.DP_GROUP) > 1 or smp_state.cfg.elastic is not None
        if self._engine is not None or may_have_replicas:
            self._placed = PlacedParameters(self.get_module(), self.home_of)

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the model now has in place of a parameter from before it was sharded."""
        return parameter if self._sharded is None else self._sharded.current(parameter)

    def has_replaced(self, parameter: nn.Parameter) -> bool:
        """Whether the model has another in the place of a parameter that it had when it was wrapped."""
        return parameter in self._replaced or super().has_replaced(parameter)

    def _refuse(self, what: str) -> NoReturn:
        raise SMPError(
            f"DistributedModel.{what} was called outside a step: put the forward and backward of one "
            "batch into a function decorated with @smp.step and call that"
        )
