"""Tensors that only one rank has are found where they are used, and told from those that all have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.side_effects.escaped import EscapedTensors


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def test_a_tensor_computed_with_parameters_is_here_alone(layer: nn.Linear) -> None:
    escaped = EscapedTensors([*layer.parameters()], frozenset())
    with pytest.raises(
        SMPUnsupportedError, match=r"after module 'x': a tensor of shape \(3, 2\) was computed"
    ):
        escaped.require_replicated([layer(torch.ones(3, 2))], [None], "module 'x'")


def test_what_all_ranks_can_have_made_alike_may_be_used(layer: nn.Linear) -> None:
    escaped = EscapedTensors([*layer.parameters()], frozenset())
    of_inputs = torch.ones(2, requires_grad=True) * 2
    without_graph = layer(torch.ones(2)).detach()
    escaped.require_replicated([of_inputs, without_graph, torch.ones(1)], [None] * 3, "the start")


def test_a_tensor_with_a_tag_is_known(layer: nn.Linear) -> None:
    escaped = EscapedTensors([*layer.parameters()], frozenset())
    escaped.require_replicated([layer(torch.ones(2))], [object()], "the start")  # type: ignore[list-item]


def test_a_buffer_that_all_ranks_keep_may_have_a_graph(layer: nn.Linear) -> None:
    moving = layer(torch.ones(2))
    memory = frozenset({moving.untyped_storage()._cdata})
    EscapedTensors([*layer.parameters()], memory).require_replicated([moving], [None], "the start")


def test_what_a_hook_has_seen_is_refused_with_its_story_as_long_as_it_lives(layer: nn.Linear) -> None:
    escaped = EscapedTensors([], frozenset())
    seen = torch.ones(4)
    escaped.note(seen, "a hook of 'x' has carried it out")
    with pytest.raises(SMPUnsupportedError, match=r"a hook of 'x' has carried it out\. Return it"):
        escaped.require_replicated([seen[:2]], [None], "the start")
    del seen
    escaped.forget()
    assert not escaped._seen
