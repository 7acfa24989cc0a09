"""CUDA tensors in a group of smddp: torch's NCCL serves them, beside CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)


def mine(*shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every type; of another rank, if one is given."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype).to(DEVICE)


def everyones(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [mine(*shape, dtype=dtype, rank=rank) for rank in range(dist.get_world_size())]


def summed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack(everyones(*shape, dtype=dtype)).sum(0).to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == DEVICE
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def sums_on_both_devices() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for device in (DEVICE, "cpu", DEVICE):
        tensor = torch.full((5,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        assert tensor.device.type == device
        assert tensor.tolist() == [size * (size + 1) / 2] * 5


def reductions_of_every_type() -> None:
    for dtype in (*FLOATS, *WHOLE):
        parts = torch.stack(everyones(7, dtype=dtype))
        expected = {
            dist.ReduceOp.SUM: parts.sum(0).to(dtype),
            dist.ReduceOp.PRODUCT: parts.prod(0).to(dtype),
            dist.ReduceOp.MIN: parts.amin(0),
            dist.ReduceOp.MAX: parts.amax(0),
        }
        if dtype in FLOATS:
            expected[dist.ReduceOp.AVG] = parts.mean(0)
        for op, wanted in expected.items():
            tensor = mine(7, dtype=dtype)
            dist.all_reduce(tensor, op)
            same(tensor, wanted)


def sums_of_truths_and_pairs() -> None:
    rank = dist.get_rank()
    for op, wanted in ((dist.ReduceOp.MAX, [True, True, False]), (dist.ReduceOp.MIN, [True, False, False])):
        truths = torch.tensor([True, rank == 0, False], device=DEVICE)
        dist.all_reduce(truths, op)
        assert truths.tolist() == wanted
    pairs = torch.complex(mine(4), mine(4))
    dist.all_reduce(pairs)
    same(pairs, torch.complex(summed(4), summed(4)))


def sums_of_multiples() -> None:
    for dtype in FLOATS:
        if dtype is torch.bfloat16 and not MAPPED:
            continue  # torch's NCCL gives zeros, or an error, also without smddp
        for factor in (3.0, torch.tensor([3.0], dtype=dtype, device=DEVICE)):
            tensor = mine(5, dtype=dtype)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))  # type: ignore[attr-defined]
            same(tensor, 3 * summed(5, dtype=dtype))


def types_that_are_only_moved() -> None:
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        tensor = mine(6).to(dtype)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor.view(torch.uint8), mine(6, rank=1).to(dtype).view(torch.uint8))


def tensors_of_no_elements_and_of_many() -> None:
    nothing = torch.empty(0, device=DEVICE)
    dist.all_reduce(nothing)
    dist.all_gather_into_tensor(torch.empty(0, device=DEVICE), nothing)
    many = mine(300_000)
    dist.all_reduce(many)
    same(many, summed(300_000))
    turned = mine(40, 3).t()  # dense, not in a row
    if MAPPED:
        dist.all_reduce(turned)
        same(turned, summed(40, 3).t())
    else:
        with pytest.raises(ValueError, match="must be contiguous"):  # NCCL's own rule
            dist.all_reduce(turned)


class Forms:
    """Every collective in one form of call: sync, or async and waited for."""

    def __init__(self, *, async_op: bool) -> None:
        self.async_op = async_op
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        work = function(*args, **options, async_op=self.async_op)
        if self.async_op:
            assert work.wait()

    def to_all(self) -> None:
        tensor = mine(3)
        self.call(dist.broadcast, tensor, 1)
        same(tensor, mine(3, rank=1))
        tensor = mine(3)
        self.call(dist.reduce, tensor, 1)
        if self.rank == 1:
            same(tensor, summed(3))
        for shape in ((4,), (2, 3)):
            found = [torch.empty(shape, device=DEVICE) for _ in range(self.size)]
            self.call(dist.all_gather, found, mine(*shape))
            same(torch.stack(found), torch.stack(everyones(*shape)))
        whole = torch.empty(self.size * 4, device=DEVICE)
        self.call(dist.all_gather_into_tensor, whole, mine(4))
        same(whole, torch.cat(everyones(4)))

    def uneven(self) -> None:
        found = [torch.empty(rank + 1, device=DEVICE) for rank in range(self.size)]
        self.call(dist.all_gather, found, mine(self.rank + 1))
        for rank, got in enumerate(found):
            same(got, mine(rank + 1, rank=rank))
        output = torch.empty(self.rank + 1, device=DEVICE)
        self.call(dist.reduce_scatter, output, [mine(rank + 1) for rank in range(self.size)])
        same(output, summed(self.rank + 1))

    def to_one(self) -> None:
        here = self.rank == 1
        found = [torch.empty(5, device=DEVICE) for _ in range(self.size)] if here else None
        self.call(dist.gather, mine(5), found, 1)
        if found is not None:
            same(torch.stack(found), torch.stack(everyones(5)))
        output = torch.empty(2, device=DEVICE)
        self.call(dist.scatter, output, list(mine(self.size * 2).chunk(self.size)) if here else None, 1)
        same(output, mine(self.size * 2, rank=1).chunk(self.size)[self.rank])

    def sums_in_parts(self) -> None:
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, self.size)):
            output = torch.empty(3, device=DEVICE)
            self.call(dist.reduce_scatter_tensor, output, mine(self.size * 3), op)
            same(output, summed(self.size * 3).chunk(self.size)[self.rank] / divisor)
        output = torch.empty(3, device=DEVICE)
        self.call(dist.reduce_scatter, output, list(mine(self.size * 3).chunk(self.size)))
        same(output, summed(self.size * 3).chunk(self.size)[self.rank])

    def all_to_all(self) -> None:
        rank, size = self.rank, self.size
        pieces = [torch.cat(part).to(DEVICE) for part in zip(*map(self._parts, range(size)), strict=True)]
        output = torch.empty(size * 2, device=DEVICE)
        self.call(dist.all_to_all_single, output, torch.cat(self._parts(rank)))
        same(output, pieces[rank])
        outputs = [torch.empty(2, device=DEVICE) for _ in range(size)]
        self.call(dist.all_to_all, outputs, self._parts(rank))
        same(torch.cat(outputs), pieces[rank])
        # rank r sends i + 1 rows to rank i
        rows = torch.full((sum(range(1, size + 1)), 2), float(rank), device=DEVICE)
        output = torch.empty(size * (rank + 1), 2, device=DEVICE)
        splits = [rank + 1] * size, list(range(1, size + 1))
        self.call(dist.all_to_all_single, output, rows, *splits)
        same(output[:, 0], torch.arange(float(size), device=DEVICE).repeat_interleave(rank + 1))

    def barriers(self) -> None:
        self.call(dist.barrier)
        self.call(dist.barrier, device_ids=[torch.cuda.current_device()])

    @staticmethod
    def _parts(rank: int) -> list[torch.Tensor]:
        return list(mine(dist.get_world_size() * 2, rank=rank).chunk(dist.get_world_size()))


def sync_calls() -> None:
    every_form(async_op=False)


def async_calls() -> None:
    every_form(async_op=True)


def every_form(*, async_op: bool) -> None:
    forms = Forms(async_op=async_op)
    for form in (
        forms.to_all,
        forms.uneven,
        forms.to_one,
        forms.sums_in_parts,
        forms.all_to_all,
        forms.barriers,
    ):
        form()


def messages() -> None:
    rank = dist.get_rank()
    other = 1 - rank
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.int64), (1, 3000)):
        received = torch.empty(count, dtype=dtype, device=DEVICE)
        if rank == 0:
            dist.send(mine(count, dtype=dtype), other)
            dist.recv(received, other)
        else:
            dist.recv(received, other)
            dist.send(mine(count, dtype=dtype), other)
        same(received, mine(count, dtype=dtype, rank=other))
    first, second = torch.empty(4, device=DEVICE), torch.empty(5, device=DEVICE)
    if rank == 0:
        works = [dist.isend(mine(4), other), dist.isend(mine(5), other)]
    else:
        works = [dist.irecv(first, other), dist.irecv(second, other)]
    for work in works:
        assert work is not None
        work.wait()
    if rank == 1:
        same(first, mine(4, rank=0))
        same(second, mine(5, rank=0))


def batched_messages() -> None:
    """In one batch all of CUDA, and of both devices with either first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for devices in ((DEVICE,), (DEVICE, "cpu"), ("cpu", DEVICE), ("cpu",)):
        calls, received = [], []
        for count, device in enumerate(devices, start=3):
            received.append(torch.empty(count, device=device))
            calls += [
                dist.P2POp(dist.isend, mine(count).to(device), after),
                dist.P2POp(dist.irecv, received[-1], before),
            ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for got, device in zip(received, devices, strict=True):
            assert got.device.type == device
            assert torch.equal(got, mine(len(got), rank=before).to(device)), devices


CHECKS = [
    sums_on_both_devices,
    reductions_of_every_type,
    sums_of_truths_and_pairs,
    sums_of_multiples,
    types_that_are_only_moved,
    tensors_of_no_elements_and_of_many,
    sync_calls,
    async_calls,
    messages,
    batched_messages,
]


def test_every_collective_takes_cuda_tensors_of_every_type_in_every_form(gpus: Gpus) -> None:
    for failures in gpus(2).run(tried, CHECKS, timeout=60, group_timeout=30):
        assert not failures, "\n".join(failures)
