"""The whole strategy: partitions, replicas, schedule, microbatches and checkpoints, by prediction.

The trace is that of one whole batch, which replicas and their microbatches share out. Of every combination
that so many ranks allow a plan is made, its schedule is played with the plan's times and messages, and what a
rank keeps is counted; of those that fit the memory the quickest comes first. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opensmd.modelparallel.planning.cost import CPU
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.plan import Plan, StageLoad, ancestors, is_inside
from opensmd.modelparallel.planning.schedule import forwards_ahead, most_active
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.planning.schedules.playing import Played, play
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes, Table, in_a_v
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v
from opensmd.modelparallel.planning.schedules.zero_bubble import zero_bubble, zero_bubble_h2
from opensmd.modelparallel.planning.trace import ModelTrace, Unit
from opensmd.modelparallel.planning.units import BYTES_PER_SECOND, MESSAGE_SECONDS

__all__ = ["Choices", "Strategy", "layers_of", "strategies"]

SCHEDULES: tuple[Pipeline, ...] = ("interleaved", "zero_bubble", "v")
# further microbatches only repeat what those in the middle do
MOST_MICROBATCHES = 64


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a strategy may be.

    Attributes:
        ranks: how many there are.
        batch: samples of the traced batch.
        memory_bytes: of a rank.
        optimizer_bytes: bytes of optimizer state for each byte of trainable parameters.
        partitions, microbatches, pipelines, checkpointing: what is allowed; None for anything.
    """

    ranks: int
    batch: int
    memory_bytes: float = math.inf
    optimizer_bytes: float = 2.0
    partitions: Collection[int] | None = None
    microbatches: Collection[int] | None = None
    pipelines: Collection[Pipeline] | None = None
    checkpointing: Collection[bool] | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.batch < 1:
            raise ValueError(
                f"a strategy needs ranks and samples, got ranks={self.ranks} and batch={self.batch}"
            )


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A combination, and what is predicted of it.

    Attributes:
        seconds: of a step of the whole batch, with reduction and optimizer.
        bubble: the share of the pipeline's time in which an average rank waits.
        rank_bytes: of the rank that needs most.
        plan: where modules live.
    """

    partitions: int
    replicas: int
    pipeline: Pipeline
    microbatches: int
    checkpointing: bool
    seconds: float
    bubble: float
    rank_bytes: float
    plan: Plan

    def settings(self) -> dict[str, Any]:
        """What ``smp.init`` must be given for it, without the checkpoints."""
        wanted: dict[str, Any] = {
            "pipeline_parallel_degree": self.partitions,
            "microbatches": self.microbatches,
            "pipeline": self.pipeline,
        }
        if self.replicas > 1:
            wanted["ddp"] = True
        if self.pipeline == "zero_bubble":
            wanted["active_microbatches"] = 2 * self.partitions - 1
        return wanted


def strategies(trace: ModelTrace, choices: Choices) -> list[Strategy]:
    """All that fit the memory, the quickest first; if none does, all, by memory.

    Args:
        trace: of the whole batch.
        choices: what is allowed.

    Raises:
        ValueError: nothing is allowed that so many ranks and samples could do.
    """
    found = list(_all(trace, choices))
    if not found:
        raise ValueError(
            f"no strategy is left: partitions must divide the {choices.ranks} ranks, and replicas times "
            f"microbatches the {choices.batch} samples of the batch"
        )
    fitting = [each for each in found if each.rank_bytes <= choices.memory_bytes]
    if fitting:
        return sorted(fitting, key=lambda each: (each.seconds, each.rank_bytes, each.partitions))
    return sorted(found, key=lambda each: (each.rank_bytes, each.seconds))


def layers_of(trace: ModelTrace) -> list[str]:
    """The layers that checkpoints are set around: alike, side by side, and of several modules."""
    inner = {name.rpartition(".")[0] for name in trace.modules if name}
    with_parameters = {
        around
        for name, info in trace.modules.items()
        if info.parameters
        for around in (name, *ancestors(name))
    }
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, info in trace.modules.items():
        if name and name in inner and name in with_parameters and not info.container:
            kinds.setdefault((name.rpartition(".")[0], info.kind), []).append(name)
    repeated = {name for names in kinds.values() if len(names) > 1 for name in names}
    return [name for name in trace.modules if name in repeated and repeated.isdisjoint(ancestors(name))]


def _all(trace: ModelTrace, choices: Choices) -> Iterator[Strategy]:
    for partitions in range(1, choices.ranks + 1):
        if choices.ranks % partitions or not _allowed(choices.partitions, partitions):
            continue
        replicas = choices.ranks // partitions
        for microbatches, checkpointing in itertools.product(
            range(1, min(choices.batch // replicas, MOST_MICROBATCHES) + 1), (False, True)
        ):
            if choices.batch % (replicas * microbatches):
                continue
            if not (
                _allowed(choices.microbatches, microbatches)
                and _allowed(choices.checkpointing, checkpointing)
            ):
                continue
            part = _part(trace, 1 / (replicas * microbatches))
            yield from _of(part, choices, partitions, replicas, microbatches, checkpointing)


def _allowed(among: Collection[Any] | None, value: Any) -> bool:
    return among is None or value in among


def _of(
    trace: ModelTrace,
    choices: Choices,
    partitions: int,
    replicas: int,
    microbatches: int,
    checkpointing: bool,
) -> Iterator[Strategy]:
    layers = layers_of(trace) if checkpointing else []
    if checkpointing and not layers:
        return
    computed_again = {layer: _activations(trace, layer) for layer in layers}
    timed = _with_checkpoints(trace, layers) if layers else trace
    for pipeline in SCHEDULES:
        if not _allowed(choices.pipelines, pipeline) or (partitions == 1 and pipeline != "interleaved"):
            continue
        pieces = in_a_v(partitions) if pipeline == "v" else None
        if pieces and len(trace.units) < 2 * partitions:
            continue
        plan = partition(
            timed,
            partitions,
            memory_weight=0.0,
            microbatches=microbatches,
            late_microbatches=0 if layers else None,
            optimizer_bytes=choices.optimizer_bytes,
            virtual_stages=pieces,
        )
        played = play(_table(pipeline, partitions, microbatches), _times(plan, pipeline))
        yield _predicted(
            plan, played, choices, (replicas, pipeline, microbatches, checkpointing), computed_again
        )


def _predicted(
    plan: Plan,
    played: Played,
    choices: Choices,
    combination: tuple[int, Pipeline, int, bool],
    computed_again: Mapping[str, int],
) -> Strategy:
    replicas, pipeline, microbatches, checkpointing = combination
    chunks = 2 if pipeline == "v" else 1
    bytes_of_ranks = []
    ends = []
    for stage, (load, kept) in enumerate(zip(plan.loads, played.kept, strict=True)):
        again = [size for name, size in computed_again.items() if plan.homes[name] == stage]
        gradients = (load.training_bytes - load.parameter_bytes) / (1 + choices.optimizer_bytes)
        kept_bytes = kept * load.activation_bytes / chunks + max(again, default=0)
        size = load.training_bytes + load.new_gradient_bytes + kept_bytes
        bytes_of_ranks.append(size + (gradients if replicas > 1 else 0.0))  # buckets
        reduced = 2 * (replicas - 1) / replicas * gradients / BYTES_PER_SECOND
        updated = gradients * (3 + 2 * choices.optimizer_bytes) / CPU.bytes
        ends.append(reduced + updated)
    busy = microbatches * sum(load.seconds for load in plan.loads) / plan.stages
    return Strategy(
        partitions=plan.stages,
        replicas=replicas,
        pipeline=pipeline,
        microbatches=microbatches,
        checkpointing=checkpointing,
        seconds=played.seconds + max(ends),
        bubble=1 - busy / played.seconds if played.seconds else 0.0,
        rank_bytes=max(bytes_of_ranks),
        plan=plan,
    )


def _table(pipeline: Pipeline, partitions: int, microbatches: int) -> Table:
    if pipeline == "interleaved":
        return zero_bubble(
            partitions, microbatches, forwards_ahead(partitions, most_active(partitions, None))
        )
    return {"zero_bubble": zero_bubble_h2, "v": zero_bubble_v}[pipeline](partitions, microbatches)


def _times(plan: Plan, pipeline: Pipeline) -> list[ChunkTimes]:
    """What each stage of the model takes, with the messages of its partition."""
    messages = [0.0] * plan.stages
    for crossing in plan.crossings:
        seconds = crossing.tensors * MESSAGE_SECONDS + crossing.bytes / BYTES_PER_SECOND
        messages[crossing.source] += seconds
        messages[crossing.target] += seconds
    times = [_of_load(load, sent) for load, sent in zip(plan.loads, messages, strict=True)]
    if pipeline != "v":
        return times
    halves = [ChunkTimes(*(part / 2 for part in each)) for each in times]
    return [*halves, *reversed(halves)]


def _of_load(load: StageLoad, sent: float) -> ChunkTimes:
    late = load.late_seconds if load.late else 0.0
    return ChunkTimes(load.forward_seconds + sent, load.backward_seconds - late + sent, late)


def _part(trace: ModelTrace, share: float) -> ModelTrace:
    """``trace`` of so large a part of its batch; beginning an operation takes as long as before."""
    operations: dict[int, int] = {}
    for name, info in trace.modules.items():
        unit = trace.anchors[name]
        operations[unit] = operations.get(unit, 0) + info.operations
    units = [_part_of(unit, share, operations.get(i, 0)) for i, unit in enumerate(trace.units)]
    edges = [replace(edge, bytes=int(edge.bytes * share)) for edge in trace.edges]
    return replace(trace, units=tuple(units), edges=tuple(edges))


def _part_of(unit: Unit, share: float, operations: int) -> Unit:
    def seconds(whole: float, starts: float) -> float:
        fixed = min(whole, starts * CPU.start)
        return fixed + (whole - fixed) * share

    late = unit.late_seconds / unit.backward_seconds if unit.backward_seconds else 0.0
    backward = seconds(unit.backward_seconds, 2 * operations)
    return replace(
        unit,
        forward_seconds=seconds(unit.forward_seconds, operations),
        backward_seconds=backward,
        late_seconds=late * backward,
        activation_bytes=int(unit.activation_bytes * share),
        late_input_bytes=int(unit.late_input_bytes * share),
        late_gradient_bytes=int(unit.late_gradient_bytes * share),
    )


def _inside(trace: ModelTrace, layer: str) -> list[int]:
    return [index for index, decider in enumerate(trace.deciders) if is_inside(decider, layer)]


def _activations(trace: ModelTrace, layer: str) -> int:
    return sum(trace.units[index].activation_bytes for index in _inside(trace, layer))


def _with_checkpoints(trace: ModelTrace, layers: Sequence[str]) -> ModelTrace:
    """Layers keep their inputs alone, and compute their forward again before their backward."""
    units = list(trace.units)
    for layer in layers:
        own = _inside(trace, layer)
        given = {
            edge.tensor: edge.bytes for edge in trace.edges if edge.target in own and edge.source not in own
        }
        for index in own:
            unit = units[index]
            units[index] = replace(
                unit,
                backward_seconds=unit.backward_seconds + unit.forward_seconds,
                activation_bytes=sum(given.values()) if index == own[0] else 0,
                late_seconds=0.0,
                late_input_bytes=0,
                late_gradient_bytes=0,
            )
    return replace(trace, units=tuple(units))
