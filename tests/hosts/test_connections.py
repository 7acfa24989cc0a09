"""Between two ranks of several hosts data go one way over each connection: none waits for the other way."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.ranks import run_once

COUNT = 4 << 20  # elements
MUCH = 1 << 20  # bytes of a connection that carries data, and more than words that data are waited for
ACKED_AND_RECEIVED = 120  # in linux/tcp.h's tcp_info, two numbers of 64 bits


def moved() -> dict[tuple[object, object], tuple[int, int]]:
    """What each TCP connection of this process has sent and received, in bytes."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            ends = (connection.getsockname(), connection.getpeername())
            found[ends] = struct.unpack_from("QQ", info, ACKED_AND_RECEIVED)
    return found


def run_two_way_collectives() -> list[tuple[int, ...]]:
    """What connections have carried since all were made, where that is much."""
    init_on("ab")
    tensor = torch.ones(COUNT)
    dist.all_reduce(tensor)
    before = moved()
    dist.all_reduce(tensor)
    dist.all_to_all_single(torch.empty(COUNT), tensor)
    dist.all_gather([torch.empty(COUNT), torch.empty(COUNT)], tensor)
    dist.barrier()
    after = moved()
    assert float(tensor[0]) == 4.0
    carried = [
        (after[ends][0] - sent, after[ends][1] - received) for ends, (sent, received) in before.items()
    ]
    dist.destroy_process_group()
    return [each for each in carried if max(each) > MUCH]


def test_data_go_one_way_over_each_connection() -> None:
    for carried in values(run_once(2, run_two_way_collectives, backend=None)):
        assert len(carried) == 2
        assert sorted(sent > received for sent, received in carried) == [False, True]
        assert all(min(each) < MUCH // 8 for each in carried)
