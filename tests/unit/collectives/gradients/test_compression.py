"""What the state of compressed gradients keeps, of parameters and not of buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.collectives.gradients.compression import CompressionState


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]


def test_residuals_follow_their_parameters_into_other_buckets() -> None:
    first, second, third = parameters()
    state = CompressionState("int8")
    state.residual_of(0, [first, second]).copy_(torch.arange(5.0))
    state.residual_of(1, [third]).fill_(7)
    assert state.residual_of(0, [first, second]).tolist() == [0, 1, 2, 3, 4]
    assert state.residual_of(0, [third, first]).tolist() == [7, 7, 7, 7, 0, 1]
    assert state.residual_of(1, [second]).tolist() == [2, 3, 4]
    taken = state.take_residual([second, first])
    assert taken is not None and taken.tolist() == [2, 3, 4, 0, 1]
    assert state.take_residual([first, second]) is None
    assert state.residual_of(0, [third, first]).tolist() == [7, 7, 7, 7, 0, 0]


def test_what_is_saved_is_a_copy_and_belongs_to_names() -> None:
    model = nn.Linear(2, 1)
    state, other = CompressionState("int8"), CompressionState("bf16", error_feedback=True)
    residual = state.residual_of(0, list(model.parameters()))
    residual.copy_(torch.tensor([1.0, 2.0, 3.0]))
    saved = state.state_dict(model)
    residual.zero_()
    assert saved["weight"].tolist() == [[1, 2]] and saved["bias"].tolist() == [3]
    other.load_state_dict(model, saved)
    assert other.residual_of(5, list(model.parameters())).tolist() == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"residual of 'bias' has shape \(2,\), but the model has shape \(1,\)"
    ):
        other.load_state_dict(model, {"bias": torch.zeros(2)})
    assert other.residual_of(5, list(model.parameters())).tolist() == [1, 2, 3]


def test_int8_alone_feeds_back_unless_asked_and_other_names_are_refused() -> None:
    assert CompressionState("int8").error_feedback and not CompressionState("bf16").error_feedback
    assert not CompressionState("int8", error_feedback=False).error_feedback
    with pytest.raises(ValueError, match="compression='int4': expected one of bf16, fp16, int8"):
        CompressionState("int4")
