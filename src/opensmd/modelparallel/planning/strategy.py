"""The whole strategy: partitions, replicas, schedule, microbatches and checkpoints, by prediction.

The trace is that of one whole batch, which is divided among replicas and microbatches. For every combination
that the number of ranks allows, a plan is made, its schedule is simulated with the plan's times and messages,
and the memory of each rank is counted. Of those that fit, the fastest comes first. Searching for an order
takes a second, so it is done only for the fastest combinations. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from opensmd.modelparallel.planning.costs.cost import CPU
from opensmd.modelparallel.planning.derived_traces import (
    activation_bytes,
    layers_of,
    part_of_batch,
    with_checkpoints,
)
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.planning.policies.limits import forwards_ahead, in_flight, most_active
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import one_forward_one_backward
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.searched import searched
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes, Table, in_a_v, looped
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble, zero_bubble_h2
from opensmd.modelparallel.planning.simulate import MOST_MICROBATCHES
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import Links

__all__ = ["Choices", "Strategy", "strategies"]

SEARCHES = 3
WORTH_A_SEARCH = 0.01  # of a step: what a searched order must save to be chosen unasked


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices that a strategy may make.

    Attributes:
        ranks: the number of ranks.
        batch: samples in the traced batch.
        memory_bytes: the memory of a rank.
        optimizer_bytes: bytes of optimizer state per byte of trainable parameters.
        memory_weight: the one for making plans.
        partitions, microbatches, pipelines, checkpointing: the allowed values; None for any.
        active_microbatches: how many may be in flight; None for what suits the schedule.
        links: gives the links between so many partitions.
    """

    ranks: int
    batch: int
    memory_bytes: float = math.inf
    optimizer_bytes: float = 2.0
    memory_weight: float = 0.0
    partitions: Collection[int] | None = None
    microbatches: Collection[int] | None = None
    pipelines: Collection[Pipeline] | None = None
    checkpointing: Collection[bool] | None = None
    active_microbatches: int | None = None
    links: Callable[[int], Links] = lambda _: Links()

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.batch < 1:
            raise ValueError(
                f"a strategy needs ranks and samples, got ranks={self.ranks} and batch={self.batch}"
            )


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A combination and its predictions.

    Attributes:
        active_microbatches: how many may be in flight.
        memory_weight: the one its plan was made with.
        seconds: of a step of the whole batch, including reduction and optimizer.
        bubble: the share of the pipeline's time that an average rank waits.
        rank_bytes: those of the rank that needs most.
        plan: where modules live.
    """

    partitions: int
    replicas: int
    pipeline: Pipeline
    microbatches: int
    checkpointing: bool
    active_microbatches: int
    memory_weight: float
    seconds: float
    bubble: float
    rank_bytes: float
    plan: Plan

    def settings(self) -> dict[str, Any]:
        """Return the settings for ``smp.init``, except the checkpoints."""
        wanted: dict[str, Any] = {
            "pipeline_parallel_degree": self.partitions,
            "microbatches": self.microbatches,
            "pipeline": self.pipeline,
            "memory_weight": self.memory_weight,
        }
        if self.replicas > 1:
            wanted["ddp"] = True
        if self.active_microbatches != most_active(self.partitions, None):
            wanted["active_microbatches"] = self.active_microbatches
        return wanted


def strategies(trace: ModelTrace, choices: Choices) -> list[Strategy]:
    """Return all strategies that fit the memory, fastest first; if none does, all, by memory.

    Args:
        trace: that of the whole batch.
        choices: what is allowed.

    Raises:
        ValueError: no allowed combination works for so many ranks and samples.
    """
    candidates = [
        strategy for way in _ways(choices) for strategy in _Predictions(trace, choices, way).of_tables()
    ]
    by_time = _in_order(candidates, choices)
    orders = list(_of_searches(trace, choices, by_time))
    candidates = [
        strategy for strategy in (*by_time, *orders) if _allowed(choices.pipelines, strategy.pipeline)
    ]
    if not candidates:
        raise ValueError(
            f"no strategy is left: partitions must divide the {choices.ranks} ranks, replicas times "
            f"microbatches the {choices.batch} samples of the batch, and active_microbatches, if given, must "
            "be at least as many as partitions"
        )
    return _in_order(candidates, choices)


def _in_order(candidates: Iterable[Strategy], choices: Choices) -> list[Strategy]:
    """Return those that fit the memory, by time; if none does, all by memory."""
    candidates = list(candidates)
    fitting = [strategy for strategy in candidates if strategy.rank_bytes <= choices.memory_bytes]
    if fitting:
        return sorted(
            fitting, key=lambda strategy: (strategy.seconds, strategy.rank_bytes, strategy.partitions)
        )
    return sorted(candidates, key=lambda strategy: (strategy.rank_bytes, strategy.seconds))


class _Way(NamedTuple):
    """A combination without its schedule."""

    partitions: int
    replicas: int
    microbatches: int
    checkpointing: bool


class _Schedule(NamedTuple):
    """An order of work; ``active`` microbatches may be in flight."""

    pipeline: Pipeline
    active: int
    table: Table


def _ways(choices: Choices) -> Iterator[_Way]:
    for partitions in range(1, choices.ranks + 1):
        if choices.ranks % partitions or not _allowed(choices.partitions, partitions):
            continue
        if (choices.active_microbatches or partitions) < partitions:
            continue  # no table describes such a pipeline
        replicas = choices.ranks // partitions
        for microbatches, checkpointing in itertools.product(
            range(1, min(choices.batch // replicas, MOST_MICROBATCHES) + 1), (False, True)
        ):
            if choices.batch % (replicas * microbatches):
                continue
            if _allowed(choices.microbatches, microbatches) and _allowed(
                choices.checkpointing, checkpointing
            ):
                yield _Way(partitions, replicas, microbatches, checkpointing)


def _allowed(among: Collection[Any] | None, value: Any) -> bool:
    return among is None or value in among


def _schedules(ranks: int, microbatches: int, active: int | None) -> Iterator[_Schedule]:
    """Return all schedules with tables, with as many microbatches in flight as each needs, or ``active``."""
    usual, most = most_active(ranks, active), 2 * ranks - 1
    yield _Schedule("interleaved", usual, zero_bubble(ranks, microbatches, forwards_ahead(ranks, usual)))
    if ranks == 1:
        return
    if active is None:  # idle while a gradient is late, but keeps as little as 1F1B
        yield _Schedule("interleaved", ranks, zero_bubble(ranks, microbatches, 0))
    yield _Schedule("1f1b", active or ranks, one_forward_one_backward(ranks, microbatches))
    if active is None or active >= most:
        yield _Schedule("zero_bubble", active or most, zero_bubble_h2(ranks, microbatches))
    yield _Schedule("v", usual, zero_bubble_v(ranks, microbatches))
    yield _Schedule("simple", usual, fill_drain(ranks, microbatches))


def _of_searches(trace: ModelTrace, choices: Choices, by_time: Sequence[Strategy]) -> Iterator[Strategy]:
    """Return the fastest combinations with searched orders: all if requested, otherwise shorter ones."""
    if not _allowed(choices.pipelines, "searched"):
        return
    quickest: dict[_Way, float] = {}
    for strategy in by_time:
        if strategy.partitions > 1 and strategy.pipeline == "interleaved":
            way = _Way(strategy.partitions, strategy.replicas, strategy.microbatches, strategy.checkpointing)
            quickest.setdefault(way, strategy.seconds)
    for way, seconds in itertools.islice(quickest.items(), SEARCHES):
        strategy = _Predictions(trace, choices, way).of_a_search()
        if choices.pipelines is not None or strategy.seconds < (1 - WORTH_A_SEARCH) * seconds:
            yield strategy


class _Predictions:
    """The predictions for one combination, with any schedule.

    Args:
        trace: that of the whole batch.
        choices: what is allowed.
        way: the combination.
    """

    def __init__(self, trace: ModelTrace, choices: Choices, way: _Way) -> None:
        self._choices, self._way = choices, way
        part = part_of_batch(trace, 1 / (way.replicas * way.microbatches))
        self._layers = layers_of(part) if way.checkpointing else []
        self._computed_again = {layer: activation_bytes(part, layer) for layer in self._layers}
        self._trace = with_checkpoints(part, self._layers) if self._layers else part
        self._plans: dict[int, Plan] = {}

    def of_tables(self) -> Iterator[Strategy]:
        """Predict every schedule that has a table; none if there is nothing to checkpoint."""
        way = self._way
        if way.checkpointing and not self._layers:
            return
        for schedule in _schedules(way.partitions, way.microbatches, self._choices.active_microbatches):
            divisible = schedule.pipeline != "v" or len(self._trace.units) >= 2 * way.partitions
            if divisible and self._is_wanted(schedule.pipeline):
                yield self._predicted(schedule)

    def _is_wanted(self, pipeline: Pipeline) -> bool:
        """Whether it was requested, or a search starts from the best of these."""
        allowed = self._choices.pipelines
        return _allowed(allowed, pipeline) or (pipeline == "interleaved" and _allowed(allowed, "searched"))

    def of_a_search(self) -> Strategy:
        """Predict a searched order."""
        partitions, microbatches = self._way.partitions, self._way.microbatches
        active = most_active(partitions, self._choices.active_microbatches)
        times = _times(self._plan(1), in_a_v=False)
        table = searched(looped(partitions), times, microbatches, most_kept=active)
        return self._predicted(_Schedule("searched", active, table))

    def _plan(self, pieces: int) -> Plan:
        """Plan with so many pieces of the model per partition."""
        if pieces not in self._plans:
            self._plans[pieces] = partition(
                self._trace,
                self._way.partitions,
                memory_weight=self._choices.memory_weight,
                microbatches=self._way.microbatches,
                late_microbatches=0 if self._layers else None,
                optimizer_bytes=self._choices.optimizer_bytes,
                virtual_stages=in_a_v(self._way.partitions) if pieces > 1 else None,
                links=self._choices.links(self._way.partitions),
            )
        return self._plans[pieces]

    def _predicted(self, schedule: _Schedule) -> Strategy:
        pipeline, active, table = schedule
        way = self._way
        pieces = 2 if pipeline == "v" else 1
        plan = self._plan(pieces)
        played = play(table, _times(plan, in_a_v=pieces > 1))
        kept = played.kept
        if pipeline == "1f1b":  # it may run further ahead than its table
            kept = in_flight(
                partitions=way.partitions,
                microbatches=way.microbatches,
                active_microbatches=active,
                chain=True,
            )
        busy = way.microbatches * sum(load.seconds for load in plan.loads) / plan.stages
        return Strategy(
            **way._asdict(),
            pipeline=pipeline,
            active_microbatches=active,
            memory_weight=self._choices.memory_weight,
            seconds=played.seconds + max(self._seconds_after(load) for load in plan.loads),
            bubble=1 - busy / played.seconds if played.seconds else 0.0,
            rank_bytes=max(
                self._rank_bytes(plan, stage, kept[stage] / pieces) for stage in range(plan.stages)
            ),
            plan=plan,
        )

    def _rank_bytes(self, plan: Plan, stage: int, kept: float) -> float:
        """Return the memory of a rank that keeps the activations of so many microbatches."""
        load = plan.loads[stage]
        again = [size for name, size in self._computed_again.items() if plan.homes[name] == stage]
        kept_bytes = kept * load.activation_bytes + max(again, default=0)
        buckets = self._gradient_bytes(load) if self._way.replicas > 1 else 0.0
        return load.training_bytes + load.new_gradient_bytes + kept_bytes + buckets

    def _seconds_after(self, load: StageLoad) -> float:
        """Return how long a stage takes for the reduction of its gradients and the optimizer."""
        replicas, optimizer_bytes = self._way.replicas, self._choices.optimizer_bytes
        links = self._choices.links(self._way.partitions)
        here = 2 * (replicas - 1) / replicas / links.on_one_host.rate
        averaging = max(here, links.averaging)
        gradients = self._gradient_bytes(load)
        return gradients * averaging + gradients * (3 + 2 * optimizer_bytes) / CPU.bytes

    def _gradient_bytes(self, load: StageLoad) -> float:
        return (load.training_bytes - load.parameter_bytes) / (1 + self._choices.optimizer_bytes)


def _times(plan: Plan, *, in_a_v: bool) -> list[ChunkTimes]:
    """Return the time of each of the model's stages, including its partition's messages."""
    messages = [0.0] * plan.stages
    for crossing in plan.crossings:
        messages[crossing.source] += crossing.seconds
        messages[crossing.target] += crossing.seconds
    times = [
        ChunkTimes(load.times.forward + sent, load.times.backward + sent, load.times.weights)
        for load, sent in zip(plan.loads, messages, strict=True)
    ]
    if not in_a_v:
        return times
    halves = [whole.shared_out(2) for whole in times]
    return [*halves, *reversed(halves)]
