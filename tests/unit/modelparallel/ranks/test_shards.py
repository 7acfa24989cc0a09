"""Slices of tensors, and which parameters have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.ranks.shards import Shard, ShardedModule, bounds, shards_of


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (7, 3), (2, 4), (5, 1)])
def test_slices_are_torchs_chunks_and_some_may_be_empty(size: int, parts: int) -> None:
    whole = torch.arange(size)
    chunks = [chunk.tolist() for chunk in whole.chunk(parts)]
    slices = [whole[slice(*bounds(size, parts, rank))].tolist() for rank in range(parts)]
    assert slices == chunks + [[]] * (parts - len(chunks))


def test_a_rank_cuts_its_slice_and_knows_the_wholes_shape() -> None:
    whole, shard = torch.arange(12).view(2, 6), Shard(axis=1, size=6)
    assert shard.cut(whole, 3, 1).tolist() == [[2, 3], [8, 9]]
    assert shard.cut(whole, 3, 1).data_ptr() == whole[:, 2:].data_ptr(), "a view"
    assert shard.whole_shape(torch.Size([2, 2])) == (2, 6)


def test_split_parameters_have_their_full_names_tied_ones_all_of_them() -> None:
    part = ShardedModule()
    part.shards["weight"] = Shard(axis=0, size=4)
    model = nn.ModuleDict({"first": nn.ModuleList([part]), "again": part, "plain": nn.Linear(1, 1)})
    assert set(shards_of(model)) == {"first.0.weight", "again.weight"}
    assert set(shards_of(part)) == {"weight"}
