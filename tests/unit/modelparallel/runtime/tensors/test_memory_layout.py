"""How the numbers of a tensor travel: what keeps its strides, and what is sent of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.runtime.calls.descriptions.description import TensorDescription
from opensmd.modelparallel.runtime.tensors.memory_layout import in_memory_order, strides_kept

CUBE = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [CUBE, CUBE.view(2, 1, 12), CUBE[0, 0, 0], CUBE[:0], CUBE[::2], CUBE[:, :, ::2], torch.ones(1).expand(3)],
    ids=["contiguous", "of size 1", "one number", "empty", "first", "with gaps", "expanded"],
)
def test_these_arrive_contiguous(tensor: Tensor) -> None:
    assert strides_kept(tensor.shape, tensor.stride()) == ()
    assert in_memory_order(tensor, tensor.shape, tensor.stride()) is tensor


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_permuted_ones_keep_their_strides_and_travel_without_a_copy(order: tuple[int, ...]) -> None:
    tensor = CUBE.permute(order)
    assert strides_kept(tensor.shape, tensor.stride()) == tensor.stride()
    sent = in_memory_order(tensor, tensor.shape, tensor.stride())
    assert sent.data_ptr() == CUBE.data_ptr() and torch.equal(sent, CUBE.reshape(-1))


def test_the_form_that_was_told_counts_and_not_the_strides_at_hand() -> None:
    told = CUBE.permute(2, 0, 1)
    at_hand = told.contiguous()
    sent = in_memory_order(at_hand, told.shape, told.stride())
    assert torch.equal(sent.as_strided(told.shape, told.stride()), told)
    assert in_memory_order(told, at_hand.shape, at_hand.stride()) is told  # made contiguous by sending


def test_placeholders_have_the_strides_that_are_told() -> None:
    shapes = [shape for dims in range(4) for shape in itertools.product((0, 1, 3), repeat=dims)]
    tensors = [torch.empty(shape) for shape in shapes] + [torch.empty(2, 3).t(), torch.empty(4, 4)[:, ::2]]
    for tensor in tensors:
        told = TensorDescription(tuple(tensor.shape), tensor.stride(), tensor.dtype, "cpu", False)
        assert told.is_contiguous == (tensor.stride() == torch.empty(tensor.shape).stride())
        made = told.placeholder()
        assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
