"""Equal slices of tensors as vectors, and rows."""

from __future__ import annotations

import pytest
import torch

from opensmd.modelparallel.ranks.slices import Rows, Slicing


@pytest.mark.parametrize(("elements", "ranks"), [(12, 3), (7, 3), (2, 4)])
def test_slices_of_all_ranks_are_the_whole_and_travel_at_one_length(elements: int, ranks: int) -> None:
    whole = torch.arange(float(elements)) + 1
    slicings = [Slicing(ranks, rank) for rank in range(ranks)]
    assert torch.cat([slicing.cut(whole) for slicing in slicings]).tolist() == whole.tolist()
    padded = [slicing.padded(slicing.cut(whole), elements) for slicing in slicings]
    assert {piece.numel() for piece in padded} == {slicings[0].length(elements)}
    assert torch.cat(padded)[:elements].tolist() == whole.tolist()


def test_a_slice_of_a_contiguous_tensor_is_its_memory() -> None:
    whole = torch.zeros(2, 3)
    Slicing(2, 1).cut(whole).fill_(1.0)
    assert whole.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_the_last_ranks_may_have_fewer_rows_or_none() -> None:
    whole = torch.arange(10).view(5, 2)
    rows = [Rows(4, rank).cut(whole).shape[0] for rank in range(4)]
    assert rows == [2, 2, 1, 0]
