"""What torch's functions are known as: reading values, drawing numbers, depending on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opensmd.modelparallel.runtime.calls.operations import (
    DEPENDS_ON_DATA,
    RANDOM,
    READS_VALUE,
    in_fixed_order,
    indexes_by_mask,
)
from opensmd.modelparallel.runtime.tensors.functions import getter
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag


@pytest.mark.parametrize(
    "reads",
    [
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__repr__,
        Tensor.__format__,
        Tensor.__array__,
        Tensor.__contains__,
        Tensor.is_nonzero,
        Tensor.equal,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    ],
)
def test_functions_whose_answer_is_a_python_value_read_it(reads: Callable[..., Any]) -> None:
    assert reads in READS_VALUE


@pytest.mark.parametrize(
    "draws",
    [
        torch.randn_like,
        torch.bernoulli,
        Tensor.normal_,
        Tensor.uniform_,
        F.dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.alpha_dropout,
        F.multi_head_attention_forward,
        torch.nn.init.orthogonal_,
        torch.multinomial,
        torch.nn.init.xavier_uniform_,
        F.scaled_dot_product_attention,
        torch.randperm,
    ],
)
def test_functions_that_draw_numbers_are_known(draws: Callable[..., Any]) -> None:
    assert draws in RANDOM


@pytest.mark.parametrize("computes", [torch.add, Tensor.mul_, F.relu, torch.empty, torch.nn.init.constant_])
def test_functions_that_draw_none_are_not_taken_for_such(computes: Callable[..., Any]) -> None:
    assert computes not in RANDOM and computes not in READS_VALUE and computes not in DEPENDS_ON_DATA


def test_a_shape_that_depends_on_data_is_expected_of_what_counts_or_selects() -> None:
    assert {torch.nonzero, Tensor.masked_select, torch.unique, Tensor.indices} <= DEPENDS_ON_DATA
    assert {torch.bincount, Tensor.bincount, torch.argwhere, getter("grad")} <= DEPENDS_ON_DATA


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_between_brackets_selects_by_data_and_numbers_do_not(dtype: torch.dtype) -> None:
    rows, mask, numbers = torch.ones(2), torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.long)
    assert indexes_by_mask(Tensor.__getitem__, [rows, mask])
    assert not indexes_by_mask(Tensor.__getitem__, [rows, numbers])
    assert not indexes_by_mask(Tensor.__getitem__, [mask])
    assert not indexes_by_mask(Tensor.mul, [rows, mask])


def of_stage(home: int) -> Tensor:
    tensor = torch.ones(2)
    put_tag(tensor, Tag(home))
    return tensor


@pytest.mark.parametrize(("name", "swapped"), [("gt", "lt"), ("ge", "le")])
def test_greater_is_asked_as_less_with_its_sides_swapped(name: str, swapped: str) -> None:
    left, right = of_stage(0), of_stage(1)
    function, args = in_fixed_order(getattr(Tensor, name), (left, right))
    assert function == getattr(Tensor, swapped) and args[0] is right and args[1] is left
    assert in_fixed_order(getattr(Tensor, swapped), (left, right))[1][0] is left


@pytest.mark.parametrize("function", [Tensor.eq, Tensor.ne])
def test_the_sides_of_an_equality_have_one_order(function: Callable[..., Any]) -> None:
    left, right = of_stage(0), of_stage(1)
    one, other = in_fixed_order(function, (left, right))[1], in_fixed_order(function, (right, left))[1]
    assert one[0] is other[0] and one[1] is other[1]
