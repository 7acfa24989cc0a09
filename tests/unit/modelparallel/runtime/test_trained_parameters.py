"""Which parameters are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.tags import Tag
from opensmd.modelparallel.runtime.trained_parameters import TrainedParameters

BOTH = (True, True)


def made() -> tuple[TrainedParameters, list[nn.Parameter], list[Tag]]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    tags = [Tag(rank, True) for rank in range(2)]
    return TrainedParameters(list(zip(parameters, tags, strict=True))), parameters, tags


def test_freezing_between_steps_makes_calls_unlike_those_before_and_unfreezing_like_them_again() -> None:
    trained, _, tags = made()
    trained.begin_step(BOTH, may_change=False)
    before = trained.epoch
    trained.begin_step((True, False), may_change=False)
    assert trained.epoch != before and not tags[1].requires_grad
    trained.begin_step(BOTH, may_change=False)
    assert trained.epoch == before and tags[1].requires_grad


def test_freezing_within_a_step_needs_a_microbatch_that_is_alone() -> None:
    trained, parameters, tags = made()
    trained.begin_step(BOTH, may_change=False)
    with pytest.raises(
        SMPUnsupportedError, match=r"requires_grad of a parameter of shape \(2,\) was changed"
    ):
        trained.change(parameters[0], tags[0], False)
    assert parameters[0].requires_grad
    trained.begin_step(BOTH, may_change=True)
    before = trained.epoch
    trained.change(parameters[0], tags[0], False)
    assert not parameters[0].requires_grad and not tags[0].requires_grad and trained.epoch != before
