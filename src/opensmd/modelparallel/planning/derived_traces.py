"""What a trace becomes for a part of its batch, and if layers are checkpointed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opensmd.modelparallel.planning.costs.cost import CPU
from opensmd.modelparallel.planning.plan import ancestors, is_inside
from opensmd.modelparallel.planning.trace import ModelTrace, Unit

__all__ = ["activation_bytes", "layers_of", "part_of_batch", "with_checkpoints"]


def part_of_batch(trace: ModelTrace, share: float) -> ModelTrace:
    """Scale ``trace`` to a part of its batch; starting an operation still takes the same time."""
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


def layers_of(trace: ModelTrace) -> list[str]:
    """Return the layers to checkpoint: similar siblings with several modules each."""
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


def activation_bytes(trace: ModelTrace, layer: str) -> int:
    """Return what a layer keeps for its backward."""
    return sum(trace.units[index].activation_bytes for index in _inside(trace, layer))


def with_checkpoints(trace: ModelTrace, layers: Sequence[str]) -> ModelTrace:
    """Let layers keep only their inputs, and recompute their forward before their backward."""
    units = list(trace.units)
    for layer in layers:
        own = _inside(trace, layer)
        freed = {
            edge.tensor: edge.bytes for edge in trace.edges if edge.target in own and edge.source not in own
        }
        for index in own:
            unit = units[index]
            units[index] = replace(
                unit,
                backward_seconds=unit.backward_seconds + unit.forward_seconds,
                activation_bytes=sum(freed.values()) if index == own[0] else 0,
                late_seconds=0.0,
                late_input_bytes=0,
                late_gradient_bytes=0,
            )
    return replace(trace, units=tuple(units))


def _inside(trace: ModelTrace, layer: str) -> list[int]:
    return [index for index, decider in enumerate(trace.deciders) if is_inside(decider, layer)]
