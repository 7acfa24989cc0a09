"""Keys: two calls are alike exactly where all ranks know them to be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.runtime.calls.keys import argument_key, call_key
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag


@dataclasses.dataclass
class Output:
    logits: Any
    cache: Any = None


class Unknown:
    pass


def key(*args: Any, epoch: int = 0, **kwargs: Any) -> tuple[Any, ...]:
    return call_key("layer", args, kwargs, epoch)


def placed(home: int) -> torch.Tensor:
    tensor = torch.zeros(2)
    put_tag(tensor, Tag(home))
    return tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.ones(2)),
        ([torch.zeros(2), 1], [torch.ones(2), 1]),
        ({"mask": torch.zeros(2)}, {"mask": torch.ones(2)}),
        (Output(torch.zeros(2)), Output(torch.ones(2))),
        (slice(0, 2), slice(0, 2)),
        (Unknown(), Unknown()),  # nothing is known alike of objects but their class
        ([float("nan"), 1.0], [float("nan"), 1.0]),  # which equals nothing
    ],
)
def test_data_makes_no_difference(one: Any, other: Any) -> None:
    assert key(one) == key(other)
    assert hash(key(one)) == hash(key(other))


def test_numbers_make_no_difference_in_arithmetic() -> None:
    def of(function: Any, *args: Any, **kwargs: Any) -> Any:
        return call_key(function, (torch.zeros(2), *args), kwargs, 0)

    assert of(Tensor.mul, 2.0) == of(Tensor.mul, 3.0) != of(Tensor.mul, 2)
    assert of(torch.add, torch.zeros(2), alpha=1) == of(torch.add, torch.ones(2), alpha=2)
    assert of(torch.sum, 0) != of(torch.sum, 1)
    assert of(torch.div, 2.0, rounding_mode="floor") != of(torch.div, 2.0, rounding_mode=None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), placed(0)),
        (placed(0), placed(1)),
        (1, 1.0),
        (1, True),
        (None, 0),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        (slice(0, 2), slice(0, 3)),
        (Output(1), Output(2)),
        (Output(1), {"logits": 1}),
    ],
)
def test_form_home_type_and_plain_values_make_a_difference(one: Any, other: Any) -> None:
    assert key(one) != key(other)
    assert argument_key(one) != argument_key(other)


def test_numbers_that_equal_nothing_are_alike_also_by_name() -> None:
    assert key(fill=float("nan"), p=0.1) == key(fill=float("nan"), p=0.1)
    assert key(fill=float("nan")) != key(fill=0.0)


def test_so_do_names_of_arguments_and_the_epoch() -> None:
    assert key(1, scale=2) != key(1, bias=2)
    assert key(1, scale=2) != key(1, 2)
    assert key(scale=1) != key(scale=1.0)
    assert key(1) != key(1, epoch=5)


def test_so_do_the_modes_in_which_results_have_other_dtypes_or_no_graph() -> None:
    seen = {key(1)}
    with torch.no_grad():
        seen.add(key(1))
    with torch.inference_mode():
        seen.add(key(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.add(key(1))
    with torch.autocast("cpu", dtype=torch.float16):
        seen.add(key(1))
    assert len(seen) == 5
    assert key(1) in seen
