"""The predicted cost of a plan, as far as the captured run tells: stage loads, crossings, table rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opensmd.modelparallel.planning.new_gradients import new_gradient_bytes
from opensmd.modelparallel.planning.plan import Crossing, Plan, PlanRow, StageLoad
from opensmd.modelparallel.planning.policies.limits import in_flight, most_active, split_backwards
from opensmd.modelparallel.planning.simulate import seconds_of_step
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import Links, UnitGroups, weights_of

__all__ = ["StepShape", "bubble", "comes_back", "predict"]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a plan's loads depend on besides the model: steps, optimizer and links.

    Attributes:
        microbatches: of a step.
        active: how many may be in flight.
        late: for how many a stage may compute weight gradients late.
        optimizer_bytes: bytes of optimizer state per byte of trainable parameters.
        links: those between the stages.
    """

    microbatches: int
    active: int
    late: int
    optimizer_bytes: float
    links: Links

    @classmethod
    def of(
        cls,
        stages: int,
        *,
        microbatches: int = 1,
        active_microbatches: int | None = None,
        late_microbatches: int | None = None,
        optimizer_bytes: float = 2.0,
        links: Links | None = None,
    ) -> StepShape:
        """Create it from these settings, with defaults for so many stages where they are None."""
        active = most_active(stages, active_microbatches)
        late = active if late_microbatches is None else min(late_microbatches, active)
        return cls(
            microbatches=microbatches,
            active=active,
            late=late,
            optimizer_bytes=optimizer_bytes,
            links=Links() if links is None else links,
        )

    def in_flight(self, stages: int, *, chain: bool) -> list[int]:
        """Return how many microbatches' activations each stage holds at most between forward and backward."""
        return in_flight(
            partitions=stages, microbatches=self.microbatches, active_microbatches=self.active, chain=chain
        )


def predict(plan: Plan, trace: ModelTrace, step: StepShape) -> Plan:
    """Return ``plan`` with ``loads``, ``crossings`` and ``rows`` filled in, and a note on empty stages."""
    rows = _rows(plan, trace)
    crossings = _crossings(plan, trace, step.links)
    chain = bool(crossings) and all(crossing.source < crossing.target for crossing in crossings)
    held, microbatches = step.in_flight(plan.stages, chain=chain), step.microbatches
    loads = [
        replace(
            _load(plan, trace, stage, step.optimizer_bytes),
            in_flight=held[stage],
            late=split_backwards(stage=stage, chain=chain, most=step.late, microbatches=microbatches),
            new_gradient_bytes=new_gradient_bytes(
                plan, trace, stage, in_flight=held[stage], microbatches=microbatches
            ),
        )
        for stage in range(plan.stages)
    ]
    return replace(
        plan,
        loads=tuple(loads),
        crossings=crossings,
        rows=rows,
        notes=plan.notes + _idle(plan, trace, rows),
    )


def bubble(plan: Plan, microbatches: int) -> float:
    """Return the share of a step that an average stage waits, due to fill, drain and uneven stages.

    With even stages this is ``(stages - 1) / (microbatches + stages - 1)``, minus what late weight gradients
    fill.
    """
    busy = sum(load.seconds for load in plan.loads)
    if busy == 0.0:
        return 1 - microbatches / (microbatches + plan.stages - 1)
    seconds = seconds_of_step(plan.loads, microbatches, in_a_v=comes_back(plan))
    return 1 - microbatches * busy / (plan.stages * seconds)


def comes_back(plan: Plan) -> bool:
    """Whether microbatches pass the stages down and up again."""
    return plan.virtual_stages > 1 and any(crossing.source > crossing.target for crossing in plan.crossings)


def _load(plan: Plan, trace: ModelTrace, stage: int, optimizer_bytes: float) -> StageLoad:
    """Return the load of a stage from one microbatch and its parameters."""
    units = [
        unit
        for unit, decider in zip(trace.units, trace.deciders, strict=True)
        if plan.homes[decider] == stage
    ]
    own = [info for name, info in trace.modules.items() if plan.homes[name] == stage]
    parameters = sum(info.parameter_bytes + info.buffer_bytes for info in own)
    trainable = sum(info.trainable_bytes for info in own)
    return StageLoad(
        forward_seconds=sum(unit.forward_seconds for unit in units),
        backward_seconds=sum(unit.backward_seconds for unit in units),
        parameter_bytes=parameters,
        training_bytes=int(parameters + trainable * (1 + optimizer_bytes)),
        activation_bytes=sum(unit.activation_bytes for unit in units),
        late_input_bytes=sum(unit.late_input_bytes for unit in units),
        late_gradient_bytes=sum(unit.late_gradient_bytes for unit in units),
        late_seconds=sum(unit.late_seconds for unit in units),
    )


def _sent(plan: Plan, trace: ModelTrace) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return (tensor, source stage, target stage) -> (source unit, bytes): once per stage that uses it."""
    sent = {}
    for edge in trace.edges:
        source = plan.homes[trace.deciders[edge.source]]
        target = plan.homes[trace.deciders[edge.target]]
        if source != target:
            sent[edge.tensor, source, target] = (edge.source, edge.bytes)
    return sent


def _crossings(plan: Plan, trace: ModelTrace, links: Links) -> tuple[Crossing, ...]:
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (_, source, target), (_, size) in _sent(plan, trace).items():
        sizes[source, target].append(size)
    return tuple(
        Crossing(
            source=source,
            target=target,
            tensors=len(crossing),
            bytes=sum(crossing),
            seconds=links.between(source, target).seconds(sum(crossing), len(crossing)),
            between_hosts=links.cross(source, target),
        )
        for (source, target), crossing in sorted(sizes.items())
    )


def _rows(plan: Plan, trace: ModelTrace) -> tuple[PlanRow, ...]:
    """Return a row per atomic module and per split module with own parameters, in execution order."""
    split = plan.split()
    place = {name: _row_of(name, split) for name in trace.modules}
    members: dict[str, list[str]] = defaultdict(list)
    for name, row in place.items():
        members[row].append(name)
    seconds: dict[str, float] = defaultdict(float)
    activations: dict[str, int] = defaultdict(int)
    for unit, decider in zip(trace.units, trace.deciders, strict=True):
        seconds[place[decider]] += unit.forward_seconds + unit.backward_seconds
        activations[place[decider]] += unit.activation_bytes
    crossing: dict[str, int] = defaultdict(int)
    for source, size in _sent(plan, trace).values():
        crossing[place[trace.deciders[source]]] += size
    rows = []
    for name in sorted(members, key=lambda name: trace.anchors[name]):
        own = [trace.modules[member] for member in members[name]]
        if name in split and not (seconds[name] or any(info.parameters for info in own)):
            continue
        rows.append(
            PlanRow(
                module=name,
                kind=trace.modules[name].kind + (" (own part)" if name in split else ""),
                stage=plan.homes[name],
                parameters=sum(info.parameters for info in own),
                parameter_bytes=sum(info.parameter_bytes for info in own),
                activation_bytes=activations[name],
                seconds=seconds[name],
                crossing_bytes=crossing[name],
            )
        )
    return tuple(rows)


def _idle(plan: Plan, trace: ModelTrace, rows: Sequence[PlanRow]) -> tuple[str, ...]:
    stages = sorted(set(range(plan.stages)) - {row.stage for row in rows})
    if not stages:
        return ()
    unused = ", ".join(map(str, stages))
    together = max(UnitGroups.of(trace, {}).members, key=len, default=())
    if 2 * len(together) > len(trace.units):
        weights = weights_of(trace, together)
        others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        why = (
            f"{len(together)} of the model's {len(trace.units)} parts use the same weights "
            f"({weights[0]}{others}) and must be on one partition with them. Use fewer partitions"
        )
    else:
        why = (
            "Use fewer partitions, or divide the model's largest modules into children (compiled and "
            "scripted modules are never divided)"
        )
    return (
        f"nothing of the model lives on partition {unused} of {plan.stages}: its processes only wait. {why}",
    )


def _row_of(name: str, split: set[str]) -> str:
    """Return the outermost module around ``name`` on a single stage; ``name`` itself if it is split."""
    row = name
    while row and row not in split and row.rpartition(".")[0] not in split:
        row = row.rpartition(".")[0]
    return row
