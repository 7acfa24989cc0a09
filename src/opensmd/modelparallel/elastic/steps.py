"""``smp.elastic_steps``: the loop over steps, at whose borders replicas join."""

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
    """The numbers of ``steps``; between two of them replicas join that have come back.

    A replica that joins takes the place in the loop, the model, optimizers and gradient scalers of another,
    and the state of ``objects``. From then on ``smp.dp_rank()`` and ``smp.dp_size()`` are others, so a step's
    batch follows from its number and from these two, asked anew in every step. Without the setting
    ``elastic`` this is a loop over ``steps`` and no more.

    Args:
        steps: alike on all replicas.
        objects: of the script, by any names: learning-rate schedulers, meters, whatever has ``state_dict``
            and ``load_state_dict``. Not the model and its optimizers, which go along anyway.

    Raises:
        TypeError: ``steps`` is no range, or an object lacks one of the two methods.
        SMPError: before ``smp.init``; in a replica that joins, if it has other optimizers or objects.
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
    for name, each in objects.items():
        if each in (state.model, *state.optimizers.values()):
            raise SMPError(f"smp.elastic_steps: replicas that join get {name!r} in any case; leave it out")
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"smp.elastic_steps: {name!r} is a {type(each).__name__} without state_dict and "
                "load_state_dict, so that a replica that joins could not take its state"
            )
