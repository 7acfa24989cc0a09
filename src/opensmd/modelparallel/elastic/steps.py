"""``smp.elastic_steps``: the loop over steps, between which replicas join."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

from opensmd.modelparallel.elastic.elastic_job import ElasticJob
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.state import state

__all__ = ["elastic_steps"]

_loops = itertools.count(1)


def elastic_steps(steps: range, **objects: Any) -> Iterator[int]:
    """Yield the numbers of ``steps``; between two of them, returning replicas may join.

    A joining replica takes over another's position in the loop, its model, optimizers and gradient scalers,
    and the state of ``objects``. After that, ``smp.dp_rank()`` and ``smp.dp_size()`` differ, so derive each
    step's batch from its number and the current values of these two. Without the setting ``elastic`` this is
    just a loop over ``steps``.

    Args:
        steps: a range, the same on all replicas.
        objects: the script's, by any names: learning-rate schedulers, meters, whatever has ``state_dict`` and
            ``load_state_dict``. Not the model and its optimizers, which are included anyway.

    Raises:
        TypeError: ``steps`` is not a range, or an object lacks one of the two methods.
        SMPError: before ``smp.init``; in a joining replica, if its optimizers or objects differ.
    """
    elastic = state.require("smp.elastic_steps").elastic
    if not isinstance(steps, range):
        raise TypeError(f"smp.elastic_steps: expected a range of step numbers, got {type(steps).__name__}")
    _require_state(objects)
    if elastic is None:
        return iter(steps)
    return _with_borders(cast("ElasticJob", elastic), steps, objects)


def _with_borders(job: ElasticJob, steps: range, objects: Mapping[str, Any]) -> Iterator[int]:
    loop = next(_loops)
    job.objects, job.position.index = objects, 0
    job.begin_loop(loop)
    while job.position.index < len(steps) and job.border(loop):
        yield steps[job.position.index]
        job.position.index += 1


def _require_state(objects: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        if value in (state.model, *state.optimizers.values()):
            raise SMPError(f"smp.elastic_steps: replicas that join get {name!r} in any case; leave it out")
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(
                f"smp.elastic_steps: {name!r} is a {type(value).__name__} without state_dict and "
                "load_state_dict, so that a replica that joins could not take its state"
            )
