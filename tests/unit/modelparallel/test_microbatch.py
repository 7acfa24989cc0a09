"""Cutting a step's arguments into microbatches."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.microbatch import split_arguments


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Output(OrderedDict[str, Any]):
    """A dict subclass, as Hugging Face's ModelOutput."""


@dataclass
class Batch:
    ids: Tensor
    name: str


class Sliced:
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> tuple[int, int, int]:
        return num_mb, mb, axis


def step(model: Any, data: Any, target: Any = None, *rest: Any, **options: Any) -> None:
    """The signature to split for."""


def fixed(data: Any, mask: Any) -> None:
    """A signature without room for more."""


@dataclass
class WithoutHash:
    def __call__(self, data: Any) -> None:
        """A dataclass, as it can be compared, has no hash."""


class WithoutReferences:
    __slots__ = ()

    def __call__(self, data: Any) -> None:
        """An object with slots alone can have no weak references."""


@pytest.mark.parametrize("function", [WithoutHash(), WithoutReferences()])
def test_step_functions_may_be_any_objects_that_can_be_called(function: Any) -> None:
    calls = split_arguments(function, (torch.arange(4),), {}, microbatches=2, non_split_inputs=["data"])
    assert [args[0].tolist() for args, _ in calls] == [[0, 1, 2, 3]] * 2


def test_tensors_are_cut_along_axis_zero_into_views() -> None:
    data = torch.arange(8.0).reshape(4, 2)
    calls = split_arguments(step, ("model", data), {"target": torch.arange(4)}, microbatches=2)
    assert [args[0] for args, _ in calls] == ["model", "model"]
    assert torch.equal(torch.cat([args[1] for args, _ in calls]), data)
    assert calls[1][0][1].data_ptr() == data[2:].data_ptr()
    assert calls[1][1]["target"].tolist() == [2, 3]


def test_containers_are_gone_through_and_keep_their_classes() -> None:
    x = torch.arange(4)
    given = (x, [x, {"a": x}], Pair(x, x), Output(a=x), {x}, Batch(x, "n"), 7, torch.tensor(3.0))
    args = split_arguments(step, given, {}, microbatches=2)[1][0]
    assert args[0].tolist() == [2, 3]
    assert args[1][0].tolist() == args[1][1]["a"].tolist() == [2, 3]
    assert type(args[2]) is Pair and args[2].second.tolist() == [2, 3]
    assert type(args[3]) is Output and args[3]["a"].tolist() == [2, 3]
    assert [argument.tolist() for argument in args[4]] == [[2, 3]]
    assert type(args[5]) is Batch and args[5].ids.tolist() == [2, 3] and args[5].name == "n"
    assert args[6] == 7 and args[7].item() == 3.0
    assert given[5].ids is x, "the caller's own objects stay as they are"


def test_axes_whole_inputs_and_own_slicing() -> None:
    x, weights, sliced = torch.zeros(2, 6), torch.zeros(5), Sliced()
    calls = split_arguments(
        step,
        ("m", x),
        {"target": sliced, "weights": weights},
        microbatches=3,
        non_split_inputs=["weights"],
        input_split_axes={"data": 1, "target": 2},
    )
    assert [args[1].shape for args, _ in calls] == [(2, 2)] * 3
    assert [kwargs["target"] for _, kwargs in calls] == [(3, 0, 2), (3, 1, 2), (3, 2, 2)]
    assert all(kwargs["weights"] is weights for _, kwargs in calls)


def test_empty_placeholders_of_other_ranks_are_cut_too() -> None:
    calls = split_arguments(step, ("m", torch.zeros(4, 0)), {}, microbatches=2)
    assert [args[1].shape for args, _ in calls] == [(2, 0)] * 2


def test_what_cannot_be_cut_is_refused_with_the_argument_and_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"argument 'data' of shape \(5, 2\).*2 microbatches do not divide"):
        split_arguments(step, ("m", torch.zeros(5, 2)), {}, microbatches=2)
    with pytest.raises(ValueError, match=r"argument 'data'\['ids'\] of shape \(3,\)"):
        split_arguments(step, ("m", {"ids": torch.zeros(3)}), {}, microbatches=2)
    with pytest.raises(ValueError, match="has no axis 1"):
        split_arguments(step, ("m", torch.zeros(4)), {}, microbatches=2, input_split_axes={"data": 1})
    with pytest.raises(ValueError, match=r"'masks' in non_split_inputs .* arguments are data, mask"):
        split_arguments(fixed, (1, 2), {}, microbatches=1, non_split_inputs=["masks"])


def test_what_one_microbatch_writes_is_no_change_to_the_others_and_in_the_batch_afterwards() -> None:
    batch = torch.arange(8).reshape(4, 2)
    pieces = [args[1] for args, _ in split_arguments(step, (None, batch), {}, microbatches=2)]
    weight = torch.ones(8, 3, requires_grad=True)
    first = torch.nn.functional.embedding(pieces[0].fill_(7), weight)
    pieces[1].fill_(6)
    torch.autograd.backward(first.sum())
    assert batch.tolist() == [[7, 7], [7, 7], [6, 6], [6, 6]]


def test_pieces_of_a_tensor_with_a_graph_stay_in_it() -> None:
    batch = torch.ones(4, 2, requires_grad=True)
    for args, _ in split_arguments(step, (None, batch), {}, microbatches=2):
        torch.autograd.backward(args[1].sum())
    assert torch.equal(batch.grad, torch.ones(4, 2))


def test_an_iterator_for_several_microbatches_is_refused_unless_they_are_to_share_it() -> None:
    rows = (row for row in torch.ones(4, 2))
    says = r"argument 'data'\[1\] is a generator, of which 2 microbatches would each get what the others"
    with pytest.raises(ValueError, match=says):
        split_arguments(fixed, ([1, rows], None), {}, microbatches=2)
    assert split_arguments(fixed, (rows, None), {}, microbatches=1)[0][0][0] is rows
    shared = split_arguments(fixed, (rows, None), {}, microbatches=2, non_split_inputs=["data"])
    assert [args[0] for args, _ in shared] == [rows, rows]


def test_a_sparse_tensor_goes_to_all_microbatches_or_to_none() -> None:
    def function(adjacency: Tensor) -> None: ...

    sparse = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match=r"'adjacency' is made of several tensors.*non_split_inputs"):
        split_arguments(function, (sparse,), {}, microbatches=2)
    whole = split_arguments(function, (sparse,), {}, microbatches=2, non_split_inputs=["adjacency"])
    assert all(args[0] is sparse for args, _ in whole)
    assert split_arguments(function, (sparse,), {}, microbatches=1)[0][0] == (sparse,)
