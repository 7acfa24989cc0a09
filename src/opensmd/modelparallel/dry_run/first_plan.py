"""A job's plan: made on the first rank in the first step, and sent to all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from opensmd.collectives.mailbox import has_mailbox
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.dry_run.module_tree import describe
from opensmd.modelparallel.dry_run.split_blocks import split_blocks
from opensmd.modelparallel.dry_run.timing.stage_links import links_of_job
from opensmd.modelparallel.manual_partition import fixed_places
from opensmd.modelparallel.planning.costs.cost import optimizer_state_ratio
from opensmd.modelparallel.planning.partition import manual_partition, partition
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.predict import StepShape
from opensmd.modelparallel.planning.schedules.tables import in_a_v, looped
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import Links
from opensmd.modelparallel.ranks.first_rank import from_first_rank
from opensmd.modelparallel.runtime.calls.inner_hooks import may_carry
from opensmd.modelparallel.settings.config import Config
from opensmd.script_level import script_level

__all__ = ["FirstPlan", "PlanRequest", "agree_on_plan"]


class _StepSettings(TypedDict):
    """What the loads of every plan depend on, however its stages are chosen."""

    microbatches: int
    active_microbatches: int | None
    late_microbatches: int | None
    optimizer_bytes: float
    links: Links


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is made from.

    Attributes:
        module: the user's model, whole on every rank.
        call: the step function on the first microbatch's arguments.
        cfg: the settings.
        optimizer: its state counts as memory; without one, Adam's is assumed.
        times, memory: measure in real runs (``trace_execution_times``, ``trace_memory_usage``). If times is
            None, operations run again where that may gain something.
        device: where a timed run takes place; None for the model's.
        has_data: False if parameters are delayed, so nothing can be computed with them.
        saved: where the checkpoint that waits to be loaded has modules, by name.
    """

    module: nn.Module
    call: Callable[[], Any]
    cfg: Config
    optimizer: torch.optim.Optimizer | None
    times: bool | None
    memory: bool
    device: torch.device | None
    has_data: bool = True
    saved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FirstPlan:
    """A plan and, on the rank that made it, how to make another.

    Attributes:
        plan: the same on all ranks.
        trace: what it was made from; None on other ranks, or if places were given by hand.
        make: makes a plan with the same settings from another trace.
    """

    plan: Plan
    trace: ModelTrace | None = None
    make: Callable[[ModelTrace], Plan] | None = None


def agree_on_plan(request: PlanRequest, group: dist.ProcessGroup) -> FirstPlan:
    """Let the first rank of ``group`` plan while the others wait, however long that takes; all must call.

    Args:
        request: what to plan, the same on all ranks.
        group: the pipeline's ranks.

    Raises:
        PeerFailed: planning failed on the first rank; it raises the cause itself.
    """
    made: list[FirstPlan] = []  # on the first rank

    def plan() -> str:
        made.append(_plan(request, _late_microbatches(request, group)))
        return made[0].plan.to_json()

    text = from_first_rank(
        plan,
        group,
        does="runs the step function once to plan the partitions",
        could_not="partition the model",
    )
    return made[0] if made else FirstPlan(Plan.from_json(text))


def _plan(request: PlanRequest, late: int | None) -> FirstPlan:
    cfg = request.cfg
    if not cfg.auto_partition or cfg.pipeline_parallel_degree == 1:
        return _plan_by_hand(request, late)
    make = partial(
        partition,
        stages=cfg.pipeline_parallel_degree,
        memory_weight=cfg.memory_weight,
        fixed=fixed_places(request.module),
        virtual_stages=virtual_stages(cfg),
        **_step_settings(request, late),
    )
    trace = _trace_to_cut(request)
    return FirstPlan(make(trace, saved=request.saved), trace, make)


def _plan_by_hand(request: PlanRequest, late: int | None) -> FirstPlan:
    """Make a plan from given places; it needs no dry run unless hooks carry tensors out of modules."""
    module, cfg = request.module, request.cfg
    stages = cfg.pipeline_parallel_degree
    by_hand = partial(
        manual_partition,
        stages=stages,
        fixed=fixed_places(module),
        default=cfg.default_partition,
        step=StepShape.of(stages, **_step_settings(request, late)),
    )
    plan = by_hand(describe(module))
    if stages == 1 or split_blocks(module) or not may_carry(module, plan):
        return FirstPlan(plan)
    trace = _what_hooks_carry(request)
    return FirstPlan(plan if trace is None else by_hand(trace))


def _step_settings(request: PlanRequest, late: int | None) -> _StepSettings:
    cfg = request.cfg
    return {
        "microbatches": cfg.microbatches,
        "active_microbatches": cfg.active_microbatches,
        "late_microbatches": late,
        "optimizer_bytes": optimizer_state_ratio(request.optimizer, masters=cfg.half_dtype is not None),
        "links": links_of_job(
            cfg,
            cfg.pipeline_parallel_degree,
            gpus=any(parameter.is_cuda for parameter in request.module.parameters()),
        ),
    }


def _trace_to_cut(request: PlanRequest) -> ModelTrace:
    """Return the partitioner's input: from a dry run, or only sizes if that is impossible or unwanted."""
    if request.cfg.skip_tracing or split_blocks(request.module):
        return describe(request.module)
    return capture(
        request.module,
        request.call,
        device=request.device,
        times=bool(request.times),
        operations=request.times is None and not request.cfg.deterministic_server,
        memory=request.memory,
        has_data=request.has_data,
    )


def virtual_stages(cfg: Config) -> Sequence[Sequence[int]] | None:
    """Return which pieces of the model each partition has, if several."""
    if cfg.virtual_stages == 1:
        return None
    partitions = cfg.pipeline_parallel_degree
    if cfg.pipeline == "interleaved":
        return looped(partitions, cfg.virtual_stages)
    return in_a_v(partitions)


def _what_hooks_carry(request: PlanRequest) -> ModelTrace | None:
    """Do the dry run for places given by hand, which only hooks make necessary; return None if it fails.

    Warns:
        UserWarning: it failed. What hooks carry out is then refused where it is used.
    """
    try:
        return capture(request.module, request.call, device=request.device, has_data=request.has_data)
    except Exception as error:
        warnings.warn(
            "the dry run of the step function, which shows what forward hooks carry out of modules, "
            f"failed: {type(error).__name__}: {error}. The step runs without it, and tensors that such hooks "
            "carry into the loss or a result are refused: let the modules return them, or keep them in "
            "attributes of the modules",
            stacklevel=script_level(),
        )
        return None


def _late_microbatches(request: PlanRequest, group: dist.ProcessGroup) -> int | None:
    """Return the most microbatches with late weight gradients; None if unbounded."""
    cfg = request.cfg
    on_cpu = all(parameter.device.type == "cpu" for parameter in request.module.parameters())
    if cfg.pipeline == "1f1b" or cfg.fixed_order or not on_cpu or not has_mailbox(group):
        return 0
    # As in the schedule of two ranks, whichever of them; the first has none.
    return 2 if cfg.pipeline == "interleaved" and cfg.pipeline_parallel_degree == 2 else None
