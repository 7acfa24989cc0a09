"""A rank that ends right after it has joined takes nothing with it that another rank still needs."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from opensmd.collectives import exchange
from tests.support.ranks import run_once


def join_and_end(slow_rank: int) -> str:
    """Rank 0, whose process serves the store, ends at once; another rank is slow to read what was agreed."""
    rank = int(os.environ["RANK"])
    wait = exchange.Exchange._wait

    def slowly(self: Any, topic: str, keys: list[str]) -> None:
        wait(self, topic, keys)
        if topic.startswith("attached"):
            time.sleep(1)

    if rank == slow_rank:
        exchange.Exchange._wait = slowly  # type: ignore[method-assign]
    __import__("smdistributed.dataparallel.torch.torch_smddp")
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("smddp", init_method=address, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        os._exit(0)
    return dist.get_backend()


def test_the_rank_that_serves_the_store_may_end_as_soon_as_its_group_is_made() -> None:
    outcomes = run_once(3, join_and_end, 2, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["died", "value", "value"], outcomes
    assert outcomes[0].value == 0
    assert outcomes[1].value == outcomes[2].value == "smddp"
