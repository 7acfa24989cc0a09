"""Gradients that exist next to the ones they are added to; pure.

A microbatch's gradient of a weight is computed before it is added to that of earlier microbatches. If the
weight has several uses (an embedding that is also the output layer), torch first adds the gradients of all
uses, so each microbatch in flight keeps one until the last of them arrives::

    microbatch 1   output layer's gradient ----- waits ----- + embedding's -> .grad
    microbatch 2        output layer's gradient ----- waits ----- + embedding's -> .grad
"""

from __future__ import annotations

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.trace import ModelTrace

__all__ = ["new_gradient_bytes"]


def new_gradient_bytes(
    plan: Plan, trace: ModelTrace, stage: int, *, in_flight: int, microbatches: int
) -> int:
    """Return the most bytes of these that a stage has at once."""
    used_again = sum(_used_again(plan, trace, stage))
    if microbatches == 1:
        return used_again
    own = [info.trainable_bytes for name, info in trace.modules.items() if plan.homes[name] == stage]
    # The first microbatch's sum becomes the gradient that all others are added to.
    return max(own, default=0) + min(in_flight, microbatches - 1) * used_again


def _used_again(plan: Plan, trace: ModelTrace, stage: int) -> list[int]:
    """Return the bytes of the stage's weights that several of its units use."""
    used_again = {
        reuse.name: min(reuse.bytes, _trainable_beside(trace, reuse.name))
        for reuse in trace.reuses
        if sum(plan.homes[trace.deciders[unit]] == stage for unit in reuse.units) > 1
    }
    for names in trace.shared:
        if plan.parameter_home(names[0]) == stage:
            used_again.setdefault(names[0], _trainable_beside(trace, names[0]))
    return list(used_again.values())


def _trainable_beside(trace: ModelTrace, parameter: str) -> int:
    """Return the bytes that its module trains, which for a large weight are nearly its own."""
    return trace.modules[trace.owner(parameter)].trainable_bytes
