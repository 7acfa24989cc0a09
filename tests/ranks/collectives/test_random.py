"""Collectives of any shape, stride, split and group, drawn at random, against plain torch.

The table of cases knows which sizes matter; this looks where nobody thought of. All cases of one draw run in
one call of the pool, one after the other, so that each also has to cope with what the one before left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks.collectives.test_table import Failures, finished, numbers, reduced
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]
Tensors = list[torch.Tensor]

SIZE = 3
GROUPS = [(0, 1, 2), (0, 2), (1, 2), (1,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]


@dataclass(frozen=True)
class Case:
    """One call on every rank of one group.

    ``shape`` is that of a whole tensor, or of one row where pieces differ in their rows; ``rows[a][b]`` is
    how many rows rank ``a`` of the group has for rank ``b``.
    """

    operation: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    reduction: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    root: int
    strides: str
    is_async: bool


class Here:
    """One case, seen from one of its ranks."""

    def __init__(self, case: Case, group: Any) -> None:
        self.case, self.group, self.size = case, group, len(case.ranks)
        self.rank = case.ranks.index(dist.get_rank())
        self.root = case.root % self.size
        self.op = getattr(dist.ReduceOp, case.reduction)

    def whole(self, rank: int) -> torch.Tensor:
        """The tensor of a rank, where all have the same shape."""
        return numbers(rank, self.case.shape, self.case.dtype)

    def wholes(self) -> Tensors:
        return [self.whole(rank) for rank in range(self.size)]

    def piece(self, giver: int, taker: int, rows: int) -> torch.Tensor:
        """What one rank has for another."""
        return numbers(giver, (rows, *self.case.shape), self.case.dtype, salt=1 + taker)

    def given(self, giver: int, taker: int) -> torch.Tensor:
        return self.piece(giver, taker, self.case.rows[giver][taker])

    def strided(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, laid out in memory as the case wants it."""
        if self.case.strides == "transposed":
            backwards = tuple(reversed(range(tensor.dim())))
            return tensor.permute(backwards).contiguous().permute(backwards)
        if self.case.strides == "spread":
            return torch.stack([tensor, tensor], -1)[..., 0]
        return tensor.clone()

    def empty_like(self, tensors: Tensors) -> Tensors:
        """Room for results, filled with something that is none."""
        return [self.strided(torch.full_like(tensor, 1)) for tensor in tensors]


Outcome = tuple[Tensors, Tensors]  # got, expected


def all_reduce(here: Here) -> Outcome:
    tensor = here.strided(here.whole(here.rank))
    finished(dist.all_reduce(tensor, here.op, group=here.group, async_op=here.case.is_async))
    return [tensor], [reduced(here.wholes(), here.op)]


def reduce(here: Here) -> Outcome:
    tensor = here.strided(here.whole(here.rank))
    finished(
        dist.reduce(tensor, op=here.op, group=here.group, group_dst=here.root, async_op=here.case.is_async)
    )
    return ([tensor], [reduced(here.wholes(), here.op)]) if here.rank == here.root else ([], [])


def broadcast(here: Here) -> Outcome:
    tensor = here.strided(here.whole(here.rank))
    finished(dist.broadcast(tensor, group=here.group, group_src=here.root, async_op=here.case.is_async))
    return [tensor], [here.whole(here.root)]


def gather(here: Here) -> Outcome:
    wholes = here.wholes()
    room = here.empty_like(wholes) if here.rank == here.root else None
    mine = here.strided(wholes[here.rank])
    finished(dist.gather(mine, room, group=here.group, group_dst=here.root, async_op=here.case.is_async))
    return (room, wholes) if room is not None else ([], [])


def scatter(here: Here) -> Outcome:
    wholes = here.wholes()
    room = here.empty_like([wholes[here.rank]])
    given = [here.strided(whole) for whole in wholes] if here.rank == here.root else None
    finished(dist.scatter(room[0], given, group=here.group, group_src=here.root, async_op=here.case.is_async))
    return room, [wholes[here.rank]]


def all_gather(here: Here) -> Outcome:
    pieces = [here.given(rank, 0) for rank in range(here.size)]
    room = here.empty_like(pieces)
    mine = here.strided(pieces[here.rank])
    finished(dist.all_gather(room, mine, group=here.group, async_op=here.case.is_async))
    return room, pieces


def reduce_scatter(here: Here) -> Outcome:
    takers = range(here.size)
    rows = here.case.rows[0]
    mine = [here.strided(here.piece(here.rank, taker, rows[taker])) for taker in takers]
    inputs = [here.piece(giver, here.rank, rows[here.rank]) for giver in range(here.size)]
    room = here.empty_like([inputs[0]])
    finished(dist.reduce_scatter(room[0], mine, here.op, group=here.group, async_op=here.case.is_async))
    return room, [reduced(inputs, here.op)]


def all_to_all(here: Here) -> Outcome:
    expected = [here.given(giver, here.rank) for giver in range(here.size)]
    room = here.empty_like(expected)
    mine = [here.strided(here.given(here.rank, taker)) for taker in range(here.size)]
    finished(dist.all_to_all(room, mine, group=here.group, async_op=here.case.is_async))
    return room, expected


def all_to_all_single(here: Here) -> Outcome:
    ranks = range(here.size)
    expected = torch.cat([here.given(giver, here.rank) for giver in ranks])
    mine = here.strided(torch.cat([here.given(here.rank, taker) for taker in ranks]))
    room = here.empty_like([expected])
    takes = [here.case.rows[giver][here.rank] for giver in ranks]
    gives = [here.case.rows[here.rank][taker] for taker in ranks]
    finished(
        dist.all_to_all_single(room[0], mine, takes, gives, group=here.group, async_op=here.case.is_async)
    )
    return room, [expected]


def messages(here: Here) -> Outcome:
    """Everybody sends to everybody, the receives posted in another order than the sends."""
    others = [rank for rank in range(here.size) if rank != here.rank]
    expected = [here.given(giver, here.rank) for giver in others]
    room = here.empty_like(expected)
    mine = [here.strided(here.given(here.rank, taker)) for taker in others]
    sends = [
        dist.isend(tensor, group=here.group, group_dst=taker, tag=taker)
        for taker, tensor in zip(others, mine, strict=True)
    ]
    for giver, tensor in reversed(list(zip(others, room, strict=True))):
        dist.recv(tensor, group=here.group, group_src=giver, tag=here.rank)
    for send in sends:
        finished(send)
    return room, expected


OPERATIONS: dict[str, Callable[[Here], Outcome]] = {
    function.__name__: function
    for function in (
        all_reduce,
        reduce,
        broadcast,
        gather,
        scatter,
        all_gather,
        reduce_scatter,
        all_to_all,
        all_to_all_single,
        messages,
    )
}
UNEVEN = {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "messages"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly small tensors, some past every limit at which the backend changes its way of moving data."""
    operation = draw(st.sampled_from(sorted(OPERATIONS)))
    ranks = draw(st.sampled_from(GROUPS))
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    most = draw(st.sampled_from([4, 4, 300, 100_000])) // max(1, prod(shape))
    count = st.integers(0, most)
    dtype = draw(st.sampled_from(DTYPES))
    # torch refuses products of complex numbers.
    reductions = ["SUM"] if dtype.is_complex else ["SUM", "PRODUCT"]
    rows = tuple(tuple(draw(count) for _ in range(SIZE)) for _ in range(SIZE))
    if operation not in UNEVEN and draw(st.booleans()):
        shape = (draw(st.integers(0, 3 * most)), *shape)
    return Case(
        operation,
        ranks,
        dtype,
        draw(st.sampled_from(reductions)),
        shape,
        rows,
        draw(st.integers(0, SIZE - 1)),
        draw(st.sampled_from(["contiguous", "transposed", "spread"])),
        draw(st.booleans()),
    )


def run_cases(drawn: Sequence[Case]) -> list[str]:
    """On every rank: the cases that went wrong."""
    failures = Failures()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted({case.ranks for case in drawn})}
    for case in drawn:
        if dist.get_rank() in case.ranks:
            got, expected = OPERATIONS[case.operation](Here(case, groups[case.ranks]))
            for mine, wanted in zip(got, expected, strict=True):
                failures.check(str(case), torch.empty_like(wanted).copy_(mine), wanted)
    dist.barrier()
    for ranks, group in groups.items():
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)
    return failures.texts


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(cases(), min_size=10, max_size=40))
def test_collectives_of_any_shape_stride_and_split_equal_plain_torch(pool: Pool, drawn: list[Case]) -> None:
    assert pool(SIZE).run(run_cases, drawn) == [[]] * SIZE
