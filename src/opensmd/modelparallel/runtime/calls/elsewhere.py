"""Calls for which this rank has neither the module nor the tensor: they leave a placeholder and a count.

A rank meets every call of the program, and most are of this kind. A known one costs less here than through
:meth:`.CallRunner.run_at`, and several consecutive ones, each called with the previous one's result, cost as
much as one::

    rank 0   layer 0 ── (layers 1 to 6: one placeholder) ── layer 7

The numbers of program points advance as if they had been called one by one, as the ranks that have some of
them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel._torch_internals import in_transform
from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
from opensmd.modelparallel.runtime.calls.descriptions.description import Passed
from opensmd.modelparallel.runtime.calls.keys import call_key
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors.tags import Tag, tag_of

__all__ = ["ModuleCall", "passed"]


class ModuleCall(NamedTuple):
    """A call of a module with one tensor.

    Attributes:
        home: the rank that runs it.
        name: for error messages.
        key: identifies equal calls, apart from their arguments.
    """

    home: int
    name: str
    key: tuple[str, str, bool]


def passed(run: CallRunner, calls: Sequence[ModuleCall], argument: Any) -> Tensor | None:
    """Return the placeholder for the result of ``calls`` on other ranks; None if there is more to do."""
    if not isinstance(argument, Tensor) or in_transform():
        return None
    tag = tag_of(argument)
    if tag is None:  # a batch that all ranks have, unless its memory has since been given a home
        _, (tag,) = run.leaves_of((argument,), {})
    context, microbatch, last = run.context, run.microbatch, calls[-1]
    key = call_key(calls, (argument,), {}, context.trained.epoch)
    known = context.calls.passed.get(key)
    if known is None:
        known = _known(context, calls, key)
        if known is None:
            return None
        context.calls.passed[key] = known
    run.transfers.bring(argument, tag, calls[0].home)
    microbatch.pass_points(known.points)
    microbatch.point = f"{last.name} on pipeline rank {last.home}"
    parents: tuple[Tag, ...] = ()
    if tag is not None and tag.requires_grad and torch.is_grad_enabled():
        parents = (tag,)
    result, serial = known.result, microbatch.serial
    placeholder = result.placeholder()
    run.put(
        placeholder, Tag(last.home, result.requires_grad, parents=parents, form=result.form, serial=serial)
    )
    return placeholder


def _known(context: PipelineContext, calls: Sequence[ModuleCall], key: tuple[Any, ...]) -> Passed | None:
    """Return what calls leave, if each is known to create one new tensor and change nothing."""
    _, argument, *modes = key
    points, result = 0, None
    for number, call in enumerate(calls):
        if result is not None:
            before = calls[number - 1].home
            argument = (result.form, result.requires_grad, before)  # as :func:`.tensor_key` of a placeholder
            points += call.home != before
        description = context.calls.descriptions.get((call.key, argument, *modes))
        result = None if description is None else description.new_tensor
        if result is None or result.shares is not None:
            return None
        points += 1
    return None if result is None else Passed(points, result)
