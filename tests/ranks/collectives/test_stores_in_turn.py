"""Groups made one after another at one address, where rank 0 serves their stores itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives.backend import register
from opensmd.modelparallel.init import init, shutdown
from tests.support.ranks import RankPool

PACES = ["everybody", "rank 0 late", "rank 0 late, its store kept"]


def groups_in_turn(kind: str, pace: str) -> list[float]:
    """Sums of three groups; a late rank 0 still serves the store of one when the others ask for the next."""
    register()
    sums, kept = [], []
    for _ in range(3):
        if kind == "smp":
            init({"partitions": 3})
        else:
            dist.init_process_group("smddp")
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
        if dist.get_rank() == 0 and "late" in pace:
            time.sleep(0.3)
        if dist.get_rank() == 0 and "kept" in pace:
            kept.append(dist.distributed_c10d._get_default_store())
        if kind == "smp":
            shutdown()
        else:
            dist.destroy_process_group()
        assert not dist.is_initialized()
    return sums


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("kind", ["smp", "smddp"])
def test_a_rank_that_is_early_for_the_next_group_does_not_meet_the_store_of_the_last_one(
    pool: Callable[[int], RankPool], kind: str, pace: str
) -> None:
    assert pool(3).run(groups_in_turn, kind, pace, backend=None) == [[3.0] * 3] * 3
