"""Which modules are gathered together when a model is sharded."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.modelparallel.ranks.slices import Rows
from opensmd.modelparallel.sharding.units import find_units, kept_units


class Stack(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))
        self.head = nn.Linear(8, 40, bias=False)
        if tied:
            self.blocks[1][0].weight = self.blocks[0][0].weight


def test_blocks_are_units_and_what_is_around_them_is_not() -> None:
    stack = Stack()
    assert find_units(stack, least=1, most=10**9) == list(stack.blocks)


def test_small_blocks_and_those_that_share_parameters_are_left_to_the_root() -> None:
    assert find_units(Stack(), least=73, most=10**9) == []
    tied = Stack(tied=True)
    assert find_units(tied, least=1, most=10**9) == list(tied.blocks)[2:]


def test_large_blocks_are_divided_where_they_have_blocks_of_their_own() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(inner, nn.Linear(8, 8))
    assert find_units(model, least=1, most=100) == [inner[0], inner[1], inner, model[1]]


def test_parameters_that_are_left_out_do_not_count() -> None:
    stack = Stack()
    left_out = {id(each) for each in stack.blocks[0].parameters()}
    assert find_units(stack, least=1, most=10**9, left_out=left_out) == list(stack.blocks)[1:]


def test_the_last_units_stay_gathered_as_far_as_they_may() -> None:
    assert kept_units([10, 10, 10], 25) == [False, True, True]
    assert kept_units([10, 10], -1) == [False, False]


def test_rows_are_shared_out_as_torch_chunks_them() -> None:
    for rows in (0, 1, 5, 8):
        tensor = torch.arange(rows * 2).view(rows, 2)
        cut = [Rows(4, rank).cut(tensor) for rank in range(4)]
        expected = list(tensor.chunk(4)) if rows else [tensor]
        expected += [tensor[:0]] * (4 - len(expected))
        assert all(torch.equal(own, chunk) for own, chunk in zip(cut, expected, strict=True))
