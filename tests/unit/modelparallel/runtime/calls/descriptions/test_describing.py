"""Descriptions: what a rank says of a result to those that hold placeholders of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.descriptions.describing import (
    ArgumentBefore,
    ResultParts,
    check_result,
    describe,
)
from opensmd.modelparallel.runtime.calls.descriptions.description import Description


def described(function: Callable[..., Any], *arguments: Tensor, foreign: tuple[int, ...] = ()) -> Description:
    """The description of what ``function`` returns for these arguments."""
    before = [ArgumentBefore.of(argument) for argument in arguments]
    return describe(
        ResultParts.of(function(*arguments), "the function"),
        arguments,
        before=before,
        foreign=[number in foreign for number in range(len(arguments))],
        depends_on_data=False,
    )


def test_one_new_tensor_is_plain_and_its_placeholder_has_its_form() -> None:
    description = described(lambda x: (x + 1).t(), torch.ones(2, 3, requires_grad=True))
    assert description.is_plain and description.new_tensor is description.tensors[0]
    placeholder = description.tensors[0].placeholder()
    assert (placeholder.shape, placeholder.stride(), placeholder.dtype) == ((3, 2), (1, 3), torch.float32)
    assert description.tensors[0].requires_grad


def test_a_result_may_be_an_argument_or_share_its_memory_or_be_its_view() -> None:
    x, y = torch.ones(4), torch.ones(4)
    (same,) = described(lambda x, y: y, x, y).tensors
    assert (same.argument, same.shares) == (1, 1)
    (view,) = described(lambda x, y: y.view(2, 2), x, y).tensors
    assert (view.argument, view.shares, view.is_view) == (None, 1, True)
    (detached,) = described(lambda x, y: y.detach(), x, y).tensors
    assert (detached.shares, detached.is_view) == (1, False)
    (new,) = described(lambda x, y: y.clone(), x, y).tensors
    assert (new.argument, new.shares, new.is_view) == (None, None, False)


def test_a_copy_that_was_fetched_is_no_argument_to_the_others() -> None:
    (copy,) = described(lambda x: x, torch.ones(2), foreign=(0,)).tensors
    assert copy.argument is None


def test_changes_in_place_are_described_with_what_they_have_changed() -> None:
    changed = described(lambda x, y: x.add_(1), torch.ones(2), torch.ones(2)).changed
    assert [tuple(change) for change in changed] == [(0, False, True, None)]
    resized = described(lambda x: x.unsqueeze_(0), torch.ones(2)).changed
    assert [tuple(change) for change in resized] == [(0, False, False, ((1, 2), (2, 1)))]


@pytest.mark.parametrize(
    ("result", "form"),
    [
        (torch.ones(1), "tensor"),
        (None, "none"),
        ((torch.ones(1), torch.ones(1)), "tuple"),
        ([torch.ones(1)], "list"),
        ({"loss": torch.ones(1)}, "pickle"),
        (OrderedDict(a=[torch.ones(1)]), "pickle"),
    ],
)
def test_a_result_is_taken_apart_and_built_again(result: Any, form: str) -> None:
    hidden = ResultParts.of(result, "the function")
    assert hidden.form == form and not hidden.has_values
    built = described(lambda: result).build([tensor + 1 for tensor in hidden.tensors])
    assert type(built) is type(result)
    assert all(tensor.item() == 2.0 for tensor in ResultParts.of(built, "the function").tensors)


def test_a_tensor_that_comes_twice_comes_back_as_one() -> None:
    x = torch.ones(1)
    hidden = ResultParts.of((x, x), "the function")
    assert hidden.form == "pickle" and len(hidden.tensors) == 1
    first, second = Description("pickle", (), pickled=hidden.pickled).build(["only"])
    assert first is second


def test_values_in_a_result_are_sent_every_time() -> None:
    assert described(lambda x: (x + 1, 3), torch.ones(1)).depends_on_data
    assert not described(lambda x: (x + 1, None), torch.ones(1)).depends_on_data


def test_what_cannot_be_described_says_what_can() -> None:
    with pytest.raises(SMPUnsupportedError, match=r"what the function returned cannot be described"):
        ResultParts.of((torch.ones(1), lambda: 1), "the function")


def test_another_form_than_before_is_an_error_that_shows_both() -> None:
    description = described(lambda x: x + 1, torch.ones(2))
    check_result(description, ResultParts.of(torch.zeros(2), "layer"), "layer")
    with pytest.raises(SMPError, match=r"layer returned \[\(\(3,\), .*\)\] .* returned \[\(\(2,\)"):
        check_result(description, ResultParts.of(torch.zeros(3), "layer"), "layer")
    with pytest.raises(SMPError, match="the structure, shapes and dtypes"):
        check_result(description, ResultParts.of(torch.zeros(2, dtype=torch.float64), "layer"), "layer")
