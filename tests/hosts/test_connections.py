"""Between two ranks of several hosts data go one way over each connection: none waits for the other way.

With several network interfaces there are two connections over each; all of them end with the group, or with
the process, whatever it has started.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts.test_two_hosts import init_on, values
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once
from tests.support.timeouts import meet_in_store

COUNT = 4 << 20  # elements
MUCH = 1 << 20  # bytes of a connection that carries data, and more than words that data are waited for
ACKED_AND_RECEIVED = 120  # in linux/tcp.h's tcp_info, two numbers of 64 bits
ESTABLISHED = 1  # its first byte

Ends = tuple[Any, Any]


def told_by_system() -> dict[Ends, bytes]:
    """Linux's tcp_info of each TCP connection of this process."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            found[connection.getsockname(), connection.getpeername()] = info
    return found


def moved() -> dict[Ends, tuple[int, int]]:
    """What each has sent and received, in bytes."""
    return {
        ends: struct.unpack_from("QQ", info, ACKED_AND_RECEIVED) for ends, info in told_by_system().items()
    }


def open_connections() -> set[Ends]:
    """Gloo's that neither end has closed; others lead to the store."""
    store = int(os.environ["MASTER_PORT"])
    found = {ends for ends, info in told_by_system().items() if info[0] == ESTABLISHED}
    return {(own, other) for own, other in found if store not in (own[1], other[1])}


def inherited() -> set[Ends]:
    """Those that a program keeps open which a rank becomes or starts."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if os.get_inheritable(int(path.name)):
                found.add((connection.getsockname(), connection.getpeername()))
    return found


def use_interfaces(count: int) -> None:
    """As if this host had so many."""
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join(["lo"] * count)


def run_two_way_collectives(interfaces: int) -> list[tuple[int, ...]]:
    """What connections have carried since all were made, where that is much."""
    use_interfaces(interfaces)
    init_on("ab")
    tensor = torch.ones(COUNT)
    dist.all_reduce(tensor)
    before = moved()
    dist.all_reduce(tensor)
    dist.all_to_all_single(torch.empty(COUNT), tensor)
    dist.all_gather([torch.empty(COUNT), torch.empty(COUNT)], tensor)
    dist.barrier()
    after = moved()
    dist.barrier()  # whoever ends first closes them
    assert float(tensor[0]) == 4.0
    carried = [
        (after[ends][0] - sent, after[ends][1] - received) for ends, (sent, received) in before.items()
    ]
    dist.destroy_process_group()
    return [each for each in carried if max(each) > MUCH]


@pytest.mark.parametrize("interfaces", [1, 2])
def test_data_go_one_way_over_each_connection(interfaces: int) -> None:
    for carried in values(run_once(2, run_two_way_collectives, interfaces, backend=None)):
        ways = sorted(sent > received for sent, received in carried)
        assert ways == [False] * interfaces + [True] * interfaces
        assert all(min(each) < MUCH // 8 for each in carried)


def run_giving_up(interfaces: int) -> int:
    """How many connections the group has; returns when none is left."""
    use_interfaces(interfaces)
    init_on("ab")
    before = open_connections()
    group: Any = dist.new_group()
    dist.barrier(group)
    made = open_connections() - before
    assert not made & inherited()
    meet_in_store("all are counted")
    group.set_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"], timedelta(seconds=PATIENCE))
    else:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.all_reduce(torch.ones(3), group=group)
        store.set("given up", "")
    deadline = time.monotonic() + PATIENCE / 2
    while open_yet := made & open_connections():
        assert time.monotonic() < deadline, open_yet
        time.sleep(0.05)
    return len(made)


@pytest.mark.parametrize("interfaces", [1, 2])
def test_a_rank_that_gives_up_closes_the_connections_over_all_interfaces(interfaces: int) -> None:
    made = values(run_once(2, run_giving_up, interfaces, backend=None))
    assert made == [2 * interfaces] * 2


def run_with_other_interfaces() -> str:
    use_interfaces(1 + int(os.environ["RANK"]))
    with pytest.raises(dist.DistBackendError) as error:
        init_on("ab")
    return str(error.value)


def test_ranks_that_name_other_numbers_of_interfaces_say_so_at_once() -> None:
    for error in values(run_once(2, run_with_other_interfaces, backend=None)):
        assert "on rank 1 ('lo,lo') than on rank 0 ('lo')" in error, error
