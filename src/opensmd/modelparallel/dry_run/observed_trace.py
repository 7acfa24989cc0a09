"""Making the planner's input from an observer's records and measured seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from opensmd.modelparallel.dry_run.module_tree import ModuleTree
from opensmd.modelparallel.dry_run.observing.observer import Observer
from opensmd.modelparallel.dry_run.timing.clock import UnitSeconds
from opensmd.modelparallel.dry_run.timing.unseen_work import outweighs
from opensmd.modelparallel.planning.costs.cost import accumulation_seconds
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of
from opensmd.modelparallel.planning.trace import Edge, ModelTrace, Reuse, Unit

__all__ = ["trace_of"]

# the backward's time relative to the forward's, if only the latter was measured
BACKWARD_OF_FORWARD = 2.0


def trace_of(tree: ModuleTree, observer: Observer, measured: UnitSeconds | None) -> ModelTrace:
    """Make the trace of a model from a run.

    Args:
        tree: the model's modules.
        observer: the one that saw the run.
        measured: the units' times, if measured.
    """
    begun = measured is not None and measured.with_sums
    backward = observer.backward_seconds()
    accumulation = _accumulation(tree, observer, backward, begun=begun)
    position = observer.position
    return ModelTrace(
        modules=tree.infos(observer.operations, position.calls),
        units=tuple(
            _unit(observer, index, entered, measured, backward[index], accumulation[index])
            for index, entered in enumerate(position.entered)
        ),
        edges=tuple(
            Edge(source=source, target=target, bytes=size, tensor=number)
            for (source, target, number), size in observer.flow.edges.items()
        ),
        aliases=tree.aliases,
        uses=observer.flow.uses,
        shared=tree.shared,
        reuses=_reuses(tree, observer),
        hooked=frozenset(observer.hooked),
        escapes=frozenset(observer.escapes.found),
        guests=frozenset(position.guests),
        measured=measured is not None,
    )


def _accumulation(
    tree: ModuleTree, observer: Observer, backward: Mapping[int, float], *, begun: bool
) -> Mapping[int, float]:
    """Add the accumulation of a parameter's gradient to the backward of the unit that uses it first.

    A unit without ``backward`` has no gradients.
    """
    seconds: dict[int, float] = defaultdict(float)
    for key, parameter in tree.parameters.items():
        if parameter.requires_grad and observer.flow.users.get(key):
            unit = observer.flow.uses.get(tree.owners[key][0], min(observer.flow.users[key]))
            if backward[unit]:
                seconds[unit] += accumulation_seconds(size_of(parameter), parameter.device, begun=begun)
    return seconds


def _unit(
    observer: Observer,
    index: int,
    module: str,
    measured: UnitSeconds | None,
    backward: float,
    accumulation: float,
) -> Unit:
    forward, backward = observer.forward_seconds[index], backward + accumulation
    late = observer.late.seconds[index]
    if measured is not None:
        seconds = measured.forward.get(index, 0.0)
        # if the estimate has missed something, its backward is unreliable, too
        pace = None if outweighs(seconds, forward) else seconds / forward if forward else 0.0
        if measured.backward is not None:
            backward = measured.backward.get(index, 0.0) + accumulation
        elif pace is None:
            backward = BACKWARD_OF_FORWARD * seconds if backward else 0.0
        else:
            backward *= pace
        forward, late = seconds, late if pace is None else late * pace
    return Unit(
        module=module,
        forward_seconds=forward,
        backward_seconds=backward,
        flops=observer.flops[index],
        activation_bytes=observer.activation_bytes[index],
        late_input_bytes=observer.late.input_bytes[index],
        late_gradient_bytes=observer.late.gradient_bytes[index],
        late_seconds=min(late, backward),
    )


def _reuses(tree: ModuleTree, observer: Observer) -> tuple[Reuse, ...]:
    """Return the parameters that several units use."""
    return tuple(
        Reuse(
            bytes=size_of(parameter),
            units=tuple(sorted(observer.flow.users[key])),
            name=tree.first_names[key],
            bound=key in observer.flow.bound,
        )
        for key, parameter in tree.parameters.items()
        if len(observer.flow.users.get(key, ())) > 1
    )
