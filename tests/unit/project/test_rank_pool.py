"""The pool itself: values come back by rank, failures name the rank, hung ranks show their stacks."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENCE
from tests.support.ranks import RankFailed, RankPool, Ranks, run_once


def _sum_of_ranks() -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def _rank_one_raises() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("only here")


def _rank_one_exits() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def _rank_one_sleeps_too_long() -> None:
    if os.environ["RANK"] == "1":
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(2 * PATIENCE)


def _wait_no_longer(ranks: Ranks) -> None:
    """When rank 1 sleeps, its time is over."""
    while "asleep" not in ranks.stderr(1):
        time.sleep(0.05)
    ranks._deadline = time.monotonic()


@pytest.mark.processes
def test_values_come_back_by_rank_and_the_pool_survives_a_failure() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(_sum_of_ranks, backend="gloo") == [1.0, 1.0]
        with pytest.raises(RankFailed, match="rank 1: error KeyError"):
            pool.run(_rank_one_raises, backend=None)
        assert pool.run(_sum_of_ranks, backend="gloo") == [1.0, 1.0]
    finally:
        pool.close()


@pytest.mark.processes
def test_a_dead_rank_gives_its_exit_code_and_a_hung_rank_its_stack() -> None:
    dead = run_once(2, _rank_one_exits, backend=None)
    assert (dead[0].kind, dead[1].kind, dead[1].value) == ("value", "died", 7)
    hung = run_once(2, _rank_one_sleeps_too_long, backend=None, meanwhile=_wait_no_longer)
    assert hung[1].kind == "timeout"
    assert "_rank_one_sleeps_too_long" in hung[1].text
