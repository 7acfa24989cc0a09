"""DistributedDataParallel over smddp gives what one process gives on the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from opensmd.collectives import _torch_internals
from tests.support.ddp_training import assert_same_on_all_ranks, compare
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]


# DDP compares a hook's annotations with its own types, which postponed annotations are not.
def in_arena_hook(state, bucket):  # type: ignore[no-untyped-def]
    core = _torch_internals.shared_group(None)
    assert core.heap_contains(bucket.buffer()), "the gradient bucket is not in the arena"
    return default_hooks.allreduce_hook(state, bucket)


def python_chain_hook(state, bucket):  # type: ignore[no-untyped-def]
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0].div_(dist.get_world_size()))


def run_variants() -> None:
    compare({}, {})
    compare({}, {"gradient_as_bucket_view": True})
    compare({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001})
    compare({}, {"static_graph": True})
    compare({"branches": True}, {"find_unused_parameters": True})
    compare({"accumulate": 2}, {})
    compare({"accumulate": 2}, {"gradient_as_bucket_view": True})
    compare({}, {"hook": (dist.group.WORLD, default_hooks.allreduce_hook)})
    compare({}, {"hook": (dist.group.WORLD, python_chain_hook)})
    compare({}, {"hook": (dist.group.WORLD, in_arena_hook)})
    compare({}, {"hook": (dist.group.WORLD, in_arena_hook), "gradient_as_bucket_view": True})
    compare({}, {"hook": (dist.group.WORLD, default_hooks.fp16_compress_hook)}, tolerance=1e-2)
    compare({}, {"zero": True})


def run_uneven_inputs() -> float:
    """Rank r has r + 1 batches; join() makes those who are through shadow the others."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    with ddp.join():
        for step in range(dist.get_rank() + 1):
            ddp(torch.full((2, 4), float(step))).sum().backward()
    with Join([ddp]):
        for _ in range(3 * dist.get_rank() + 1):
            ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    return float(ddp.module.weight.sum())


def run_sparse_gradients() -> None:
    torch.manual_seed(5)
    table = nn.Embedding(20, 4, sparse=True)
    start = table.weight.detach().clone()
    ddp = DistributedDataParallel(table)
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp(torch.tensor([rank, 7, 7, 19 - rank])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    alone = nn.Embedding(20, 4, sparse=True)
    alone.weight.data.copy_(start)
    rows = [row for other in range(size) for row in (other, 7, 7, 19 - other)]
    (alone(torch.tensor(rows)).sum() / size).backward()
    assert alone.weight.grad is not None
    torch.testing.assert_close(gradient.to_dense(), alone.weight.grad.to_dense())


class Complex(nn.Module):
    """Complex and real parameters of several types, of any rank of tensor, in one wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.matrix = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed = (self.matrix * self.narrow * self.wide).abs().sum(0)
        return (mixed.sum() * inputs * self.real).sum()


def run_complex_parameters() -> None:
    """Two passes, so that gradients are added to, too; expected: the mean over the ranks' inputs."""
    for view in (False, True):
        ddp, alone = DistributedDataParallel(Complex(), gradient_as_bucket_view=view), Complex()
        mean = (dist.get_world_size() + 1) / 2
        for _ in range(2):
            ddp(torch.full((4,), dist.get_rank() + 1.0)).backward()
            alone(torch.full((4,), mean)).backward()
        for got, expected in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)


def run_buffers() -> None:
    torch.manual_seed(11)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        ddp(torch.randn(8, 4) + dist.get_rank()).sum().backward()
    ddp.eval()
    ddp(torch.randn(8, 4))
    assert_same_on_all_ranks([buffer for buffer in ddp.module.buffers() if buffer.is_floating_point()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_variant_of_ddp_trains_like_one_process(pool: Pool, world_size: int) -> None:
    pool(world_size).run(run_variants)


def test_ranks_with_fewer_batches_join_the_others(pool: Pool) -> None:
    weights = pool(3).run(run_uneven_inputs)
    assert weights[0] == weights[1] == weights[2]


def test_sparse_gradients_of_an_embedding_are_averaged(pool: Pool) -> None:
    pool(3).run(run_sparse_gradients)


def test_gradients_of_complex_parameters_are_averaged(pool: Pool) -> None:
    pool(2).run(run_complex_parameters)


def test_buffers_follow_rank_zero(pool: Pool) -> None:
    pool(2).run(run_buffers)
