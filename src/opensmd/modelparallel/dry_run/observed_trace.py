"""What the planner reads, made of what an observer has written down and of seconds that were measured."""

from __future__ import annotations

from collections.abc import Mapping

from opensmd.modelparallel.dry_run.module_tree import ModuleTree, size_of
from opensmd.modelparallel.dry_run.observer import Observer
from opensmd.modelparallel.dry_run.unseen_work import outweighs
from opensmd.modelparallel.planning.cost import accumulation_seconds
from opensmd.modelparallel.planning.trace import Edge, ModelTrace, Reuse, Unit

__all__ = ["trace_of"]

# what the backward of work takes of which only a forward's measured seconds are known
BACKWARD_OF_FORWARD = 2.0


def trace_of(tree: ModuleTree, observer: Observer, measured: Mapping[int, float] | None) -> ModelTrace:
    """The trace of a model from a run of it.

    Args:
        tree: the model's modules.
        observer: saw the run.
        measured: forward seconds by unit, if they were measured.
    """
    _add_accumulation(tree, observer)
    position = observer.position
    return ModelTrace(
        modules=tree.infos(observer.operations, position.calls),
        units=tuple(
            _unit(observer, index, entered, measured) for index, entered in enumerate(position.entered)
        ),
        edges=tuple(
            Edge(source=source, target=target, bytes=size, tensor=number)
            for (source, target, number), size in observer.edges.items()
        ),
        aliases=tree.aliases,
        uses=observer.uses,
        shared=tree.shared,
        reuses=_reuses(tree, observer),
        hooked=frozenset(observer.hooked),
        escapes=frozenset(observer.escapes.found),
        guests=frozenset(position.guests),
        measured=measured is not None,
    )


def _add_accumulation(tree: ModuleTree, observer: Observer) -> None:
    """Adding a parameter's gradient up is backward work of the unit that uses it first."""
    for key, parameter in tree.parameters.items():
        if parameter.requires_grad and observer.users.get(key):
            unit = observer.uses.get(tree.owners[key][0], min(observer.users[key]))
            observer.backward_seconds[unit] += accumulation_seconds(size_of(parameter), parameter.device)


def _unit(observer: Observer, index: int, module: str, measured: Mapping[int, float] | None) -> Unit:
    forward, backward = observer.forward_seconds[index], observer.backward_seconds[index]
    late = observer.late.seconds[index]
    if measured is not None:
        seconds = measured.get(index, 0.0)
        if outweighs(seconds, forward):  # what was estimated says nothing of the backward either
            backward = BACKWARD_OF_FORWARD * seconds if backward else 0.0
        else:
            scale = seconds / forward if forward else 0.0
            backward, late = backward * scale, late * scale
        forward = seconds
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
    """The parameters that several units use."""
    return tuple(
        Reuse(
            bytes=size_of(parameter),
            units=tuple(sorted(observer.users[key])),
            name=tree.first_names[key],
            bound=key in observer.bound,
        )
        for key, parameter in tree.parameters.items()
        if len(observer.users.get(key, ())) > 1
    )
