"""Every collective against plain torch, over layouts of ranks, dtypes, reductions, sizes, sync and async.

Inputs are small whole numbers, so that sums in every dtype are exact and equality means equal bits. Every
rank can make every rank's input, and so computes what it must get.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]
Op = dist.ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *SMALL_FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool]
ORDERED = [*FLOATS, *SIGNED, torch.uint8]
BITS = [*SIGNED, torch.uint8, torch.bool]

REDUCTIONS: list[tuple[Any, list[torch.dtype]]] = [
    (Op.SUM, ALL),
    (Op.AVG, [*FLOATS, *SIGNED]),
    (Op.PRODUCT, [*FLOATS, *SIGNED, torch.uint8]),
    (Op.MIN, ORDERED),
    (Op.MAX, ORDERED),
    (Op.BAND, BITS),
    (Op.BOR, BITS),
    (Op.BXOR, BITS),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (1000,)]
# Past the payload of one flag, one staging slot and one step of the pipeline.
LONG = [(5000,), (70_001,), (400_003,)]
SMALL = 100  # elements of inputs that are kept: most cases have the same ones


def layouts(world_size: int) -> list[list[int]]:
    """The groups that cases run in: world, a part, ranks that are not neighbours, one rank alone."""
    found = [list(range(world_size)), [world_size - 1]]
    if world_size > 2:
        found += [[0, 1], [0, world_size - 1]]
    return found


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """A rank's input: whole numbers between 0 and 2 where the dtype has no sign, else -2 to 2."""
    draw = _drawn if math.prod(shape) <= SMALL else _drawn.__wrapped__
    return draw(rank, shape, dtype, salt).clone()


@functools.lru_cache(maxsize=1 << 14)
def _drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    low = 0 if dtype in (*UNSIGNED, torch.bool) else -2
    made = torch.randint(low, 3, shape, generator=generator)
    if dtype.is_complex:
        other = torch.randint(low, 3, shape, generator=generator)
        return torch.complex(made.double(), other.double()).to(dtype)
    return made.to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch can compute with."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.int64)


def reduced(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    """What plain torch makes of the inputs."""
    dtype = inputs[0].dtype
    stacked = torch.stack([wide(one) for one in inputs])
    if op == Op.SUM and dtype == torch.bool:
        return stacked.any(0)
    if op == Op.SUM:
        return stacked.sum(0).to(dtype)
    if op == Op.AVG and dtype.is_floating_point:
        return (stacked.sum(0) / len(inputs)).to(dtype)
    if op == Op.AVG:
        return torch.div(stacked.sum(0), len(inputs), rounding_mode="trunc").to(dtype)
    if op == Op.PRODUCT:
        return stacked.prod(0).to(dtype)
    if op == Op.MIN:
        return stacked.amin(0).to(dtype)
    if op == Op.MAX:
        return stacked.amax(0).to(dtype)
    fold = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
    result = inputs[0].clone()
    for one in inputs[1:]:
        result = next(fn for kind, fn in fold.items() if kind == op)(result, one)
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if torch.equal(bits(got), bits(expected)):
        return True
    if torch.equal(wide(got), wide(expected)):
        return True  # zeros of either sign
    # Averages are rounded once more.
    tolerance = 1e-2 if got.dtype in (torch.float16, torch.bfloat16) else 1e-6
    return got.dtype.is_floating_point and torch.allclose(wide(got), wide(expected), rtol=tolerance)


class Failures:
    """Collects what went wrong, so that one run tells of all cases."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.cases = 0

    def check(self, case: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.cases += 1
        if not same(got, expected) and len(self.texts) < 10:
            self.texts.append(f"{case}: got {got.flatten()[:6]}, expected {expected.flatten()[:6]}")


class Place:
    """A group under test, seen from one of its ranks."""

    def __init__(self, ranks: list[int], group: Any) -> None:
        self.ranks, self.group, self.size = ranks, group, len(ranks)
        self.rank = ranks.index(dist.get_rank())

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> list[torch.Tensor]:
        return [numbers(rank, shape, dtype, salt) for rank in range(self.size)]


def places() -> Iterator[Place]:
    for ranks in layouts(dist.get_world_size()):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            yield Place(ranks, group)


def finished(work: Any) -> None:
    if work is not None:
        assert work.wait()
        assert work.is_completed()


def run_reductions() -> tuple[int, list[str]]:
    failures = Failures()
    for place in places():
        for op, dtypes in REDUCTIONS:
            for dtype in dtypes:
                for shape in SHAPES:
                    check_reductions(failures, place, op, dtype, shape)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for shape in LONG:
                check_reductions(failures, place, Op.SUM, dtype, shape)
        dist.barrier(group=place.group)
    return failures.cases, failures.texts


def check_reductions(
    failures: Failures, place: Place, op: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    case = f"{place.ranks} {op} {dtype} {shape}"
    if dtype.is_complex and len(shape) == 0:
        shape = (1,)
    expected = reduced(place.inputs(shape, dtype), op)
    for is_async in (False, True):
        tensor = numbers(place.rank, shape, dtype)
        finished(dist.all_reduce(tensor, op, group=place.group, async_op=is_async))
        failures.check(f"all_reduce {case} async={is_async}", tensor, expected)
    for root in range(place.size):
        tensor = numbers(place.rank, shape, dtype)
        finished(dist.reduce(tensor, op=op, group=place.group, group_dst=root, async_op=root % 2 == 1))
        if place.rank == root:
            failures.check(f"reduce to {root} {case}", tensor, expected)
    pieces = [place.inputs(shape, dtype, salt) for salt in range(place.size)]  # [for whom][from whom]
    mine = [pieces[to][place.rank].clone() for to in range(place.size)]
    wanted = reduced(pieces[place.rank], op)
    output = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(output, mine, op, group=place.group)
    failures.check(f"reduce_scatter {case}", output, wanted)
    output = torch.empty(shape, dtype=dtype)
    whole = torch.cat([item.reshape(-1) for item in mine])
    finished(dist.reduce_scatter_single(output, whole, op, group=place.group, async_op=True))
    failures.check(f"reduce_scatter_single {case}", output, wanted)


def run_moves() -> tuple[int, list[str]]:
    failures = Failures()
    for place in places():
        for dtype in [*ALL, torch.complex32, torch.float8_e8m0fnu]:
            for shape in SHAPES if dtype != torch.float8_e8m0fnu else []:
                check_moves(failures, place, dtype, shape)
                check_rooted_moves(failures, place, dtype, shape)
        for shape in LONG:
            check_moves(failures, place, torch.float32, shape)
            check_rooted_moves(failures, place, torch.int16, shape)
        dist.barrier(group=place.group)
    return failures.cases, failures.texts


def check_moves(failures: Failures, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    case = f"{place.ranks} {dtype} {shape}"
    inputs = place.inputs(shape, dtype)
    for is_async in (False, True):
        outputs = [torch.empty(shape, dtype=dtype) for _ in inputs]
        finished(dist.all_gather(outputs, inputs[place.rank], group=place.group, async_op=is_async))
        for got, expected in zip(outputs, inputs, strict=True):
            failures.check(f"all_gather {case}", got, expected)
        flat = torch.empty(len(inputs) * inputs[0].numel(), dtype=dtype)
        finished(dist.all_gather_single(flat, inputs[place.rank], group=place.group, async_op=is_async))
        failures.check(f"all_gather_single {case}", flat, torch.cat([one.reshape(-1) for one in inputs]))
    # Rank i sends (i + j) % 3 rows to rank j.
    rows = [[(i + j) % 3 for j in range(place.size)] for i in range(place.size)]
    blocks = [
        [numbers(i, (rows[i][j], *shape), dtype, salt=j) for j in range(place.size)]
        for i in range(place.size)
    ]
    mine, wanted = blocks[place.rank], [blocks[i][place.rank] for i in range(place.size)]
    outputs = [torch.empty_like(one) for one in wanted]
    dist.all_to_all(outputs, mine, group=place.group)
    for got, expected in zip(outputs, wanted, strict=True):
        failures.check(f"all_to_all {case}", got, expected)
    output = torch.empty_like(torch.cat(wanted))
    splits = [len(one) for one in wanted], [len(item) for item in mine]
    finished(dist.all_to_all_single(output, torch.cat(mine), *splits, group=place.group, async_op=True))
    failures.check(f"all_to_all_single uneven {case}", output, torch.cat(wanted))
    even = torch.stack([numbers(place.rank, shape, dtype, salt=j) for j in range(place.size)])
    output = torch.empty_like(even)
    dist.all_to_all_single(output, even, group=place.group)
    expected = torch.stack([numbers(i, shape, dtype, salt=place.rank) for i in range(place.size)])
    failures.check(f"all_to_all_single even {case}", output, expected)


def check_rooted_moves(failures: Failures, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    case = f"{place.ranks} {dtype} {shape}"
    inputs = place.inputs(shape, dtype)
    for root in range(place.size):
        here, is_async = place.rank == root, root % 2 == 1
        tensor = inputs[root].clone() if here else torch.zeros(shape, dtype=torch.uint8).to(dtype)
        finished(dist.broadcast(tensor, group=place.group, group_src=root, async_op=is_async))
        failures.check(f"broadcast from {root} {case}", tensor, inputs[root])
        outputs = [torch.empty(shape, dtype=dtype) for _ in inputs] if here else None
        finished(
            dist.gather(inputs[place.rank], outputs, group=place.group, group_dst=root, async_op=is_async)
        )
        for got, expected in zip(outputs or [], inputs if here else [], strict=True):
            failures.check(f"gather to {root} {case}", got, expected)
        output = torch.empty(shape, dtype=dtype)
        finished(
            dist.scatter(
                output, inputs if here else None, group=place.group, group_src=root, async_op=is_async
            )
        )
        failures.check(f"scatter from {root} {case}", output, inputs[place.rank])


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.newest), 3, 4])
def test_every_reduction_gives_what_plain_torch_gives(pool: Pool, world_size: int) -> None:
    for cases, failures in pool(world_size).run(run_reductions):
        assert failures == []
        assert cases > 1000


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_move_gives_what_plain_torch_gives(pool: Pool, world_size: int) -> None:
    for cases, failures in pool(world_size).run(run_moves):
        assert failures == []
        assert cases > 1000
