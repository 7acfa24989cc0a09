"""Ranks, groups and objects where tensors are shared, and batches that stages get without a dry run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

PLACEMENTS = ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")
ORDERS = {"cluster": "DPT", "spread": "TPD"}


def ranks_and_groups() -> None:
    for placement in PLACEMENTS:
        restart(partitions=2, tensor_parallel_degree=2, ddp=True, placement_strategy=placement)
        order = ORDERS.get(placement, placement).replace("D", "")  # one replica
        slow, fast = divmod(smp.rank(), 2)
        assert (smp.pp_rank(), smp.tp_rank()) == ((slow, fast) if order == "PT" else (fast, slow))
        assert (smp.tp_size(), smp.pp_size(), smp.rdp_size(), smp.dp_size(), smp.mp_size()) == (2, 2, 1, 2, 4)
        assert smp.get_tp_group()[smp.tp_rank()] == smp.rank() == smp.get_pp_group()[smp.pp_rank()]
        assert smp.get_dp_group() == smp.get_tp_group() and smp.get_rdp_group() == [smp.rank()]
        sums = torch.tensor([smp.rank()])
        dist.all_reduce(sums, group=smp.get_tp_process_group())
        assert sums.item() == sum(smp.get_tp_group())
        assert smp.allgather(smp.rank(), smp.TP_GROUP) == smp.get_tp_group()
        smp.barrier(smp.TP_GROUP)
        if smp.tp_rank() == 0:
            smp.broadcast("a", smp.TP_GROUP)
            smp.send("b", 1, smp.RankType.TP_RANK)
        else:
            assert [smp.recv_from(0, smp.RankType.TP_RANK) for _ in range(2)] == ["a", "b"]
    with pytest.raises(ValueError, match="2 partitions of 4 tensor-parallel ranks"):
        restart(partitions=2, tensor_parallel_degree=4, ddp=True)


def test_ranks_that_share_tensors_have_ranks_groups_and_objects_in_every_placement(
    pool: Callable[[int], RankPool],
) -> None:
    pool(4).run(ranks_and_groups)


def train_plain_modules() -> None:
    """Modules that are not distributed see their own batches, as with data parallelism alone."""
    restart(partitions=2, microbatches=2, tensor_parallel_degree=2, ddp=True, skip_tracing=True)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(3 + smp.dp_rank())
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = smp.DistributedModel(module)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        model.backward(loss)
        return loss

    loss = step(x.chunk(2)[smp.dp_rank()]).reduce_mean()
    dist.all_reduce(loss, group=smp.get_dp_process_group())
    wanted = F.mse_loss(plain(x), x.sum(1, keepdim=True))
    wanted.backward()
    torch.testing.assert_close(loss / 2, wanted.detach())
    gradients = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)
    for name, entry in model.state_dict().items():
        torch.testing.assert_close(entry, gradients[name].detach())


def test_modules_that_are_not_distributed_train_by_data_parallelism_alone(
    pool: Callable[[int], RankPool],
) -> None:
    pool(4).run(train_plain_modules)
