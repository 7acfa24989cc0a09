"""What several hosts exchange, in a slow network: it goes in pieces."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_levels import run_exchanges
from tests.hosts.test_two_hosts import init_on, values
from tests.support.ranks import run_once

SLOW = "link=0.01,delay=1"


def slow_group(hosts: str) -> Any:
    """A group of all ranks."""
    init_on(hosts)
    os.environ["OPENSMD_NETWORK"] = SLOW
    return dist.new_group()


def run_pieces(hosts: str) -> None:
    run_exchanges(slow_group(hosts), dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("hosts", ["abcd", "aabbc"])
def test_exchanges_in_pieces_give_what_they_must(hosts: str) -> None:
    values(run_once(len(hosts), run_pieces, hosts, backend=None))


def run_other_splits(hosts: str) -> str:
    """Rank 0 sends rank 1 three pieces more than that expects."""
    group, rank, size = slow_group(hosts), dist.get_rank(), dist.get_world_size()
    given, expected = [torch.ones(100_000) for _ in range(size)], [torch.empty(100_000) for _ in range(size)]
    if rank == 1:
        expected[0] = torch.empty(75_000)
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_to_all(expected, given, group=group)
    return str(error.value)


def test_splits_that_disagree_are_an_error_on_every_rank_though_their_first_pieces_fit() -> None:
    for error in values(run_once(3, run_other_splits, "abc", backend=None)):
        assert "sends 100000 elements to rank 1" in error and "which expects 75000" in error, error
