"""What is left in pieces is known by the tensor without data that stands for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from opensmd.modelparallel.ranks.slices import Rows, Slicing, gathered
from opensmd.modelparallel.ranks.spread import Spread, left_in_pieces, spread_over

NO_GROUP = dist.ProcessGroup(0, 1)  # nothing is sent


def test_nothing_is_left_in_pieces_by_itself() -> None:
    assert spread_over(torch.ones(2), torch.Size([4]), [2, 2]) is None


def test_pieces_lie_one_behind_the_other_in_the_whole() -> None:
    whole = torch.arange(15.0).view(5, 3)
    found: list[list[Spread]] = []
    for rank in range(4):
        with left_in_pieces() as pieces:
            rows = Rows(4, rank).whole(Rows(4, rank).cut(whole), whole.shape, NO_GROUP)
            own = Slicing(4, rank)
            elements = gathered(own.cut(whole), whole.shape, own, NO_GROUP)
        assert rows.is_meta
        assert rows.shape == whole.shape
        found.append([pieces.of(rows), pieces.of(elements)])
    for spread in zip(*found, strict=True):
        assert torch.equal(torch.cat([each.piece for each in spread]), whole.view(-1))
        assert len({(each.number, each.shape, each.sizes) for each in spread}) == 1
        assert [each.piece.numel() for each in spread] == list(spread[0].sizes)


def test_other_values_are_themselves() -> None:
    with left_in_pieces() as pieces:
        assert pieces.of("text") == "text"
        other = torch.empty(2, device="meta")
        assert pieces.of(other) is other


def test_a_row_in_fp32_has_the_same_memory_where_it_may() -> None:
    with left_in_pieces() as pieces:
        full, half = (
            pieces.of(spread_over(torch.ones(6, dtype=dtype), torch.Size([2, 6]), [6, 6]))
            for dtype in (torch.float32, torch.bfloat16)
        )
        flat, converted = pieces.flat_float(full), pieces.flat_float(half)
    assert (flat.number, flat.piece, flat.shape) == (full.number, full.piece, (12,))
    assert converted.number not in (full.number, half.number)
    assert converted.dtype is torch.float32
