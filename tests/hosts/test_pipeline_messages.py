"""The pipeline's messages between hosts: receivers see what has come, in any order."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.runtime.messages.hosts_transport import HostsTransport
from opensmd.modelparallel.runtime.messages.message import ABORT, Kind, gradient_messages, make_tag
from opensmd.modelparallel.runtime.messages.opening import open_transport
from tests.hosts.test_two_hosts import init_on, values
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once
from tests.support.timeouts import meet_in_store

FORWARD, BACK = make_tag(Kind.TENSOR, 9, 1), make_tag(Kind.GRADIENT, 9, 1)
NEVER = make_tag(Kind.RESULT, 9, 1)
SIZES = (0, 1, 124, 125, 300_000)  # in a letter, and beside it


def opened(group: Any) -> HostsTransport:
    transport = open_transport(group, torch.device("cpu"))
    assert isinstance(transport, HostsTransport) and not transport.ordered
    return transport


def numbers(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def run_in_any_order(transport: HostsTransport, rank: int) -> None:
    """Rank 2 hears a rank of its own host and one of another."""
    tags = {size: make_tag(Kind.TENSOR, 0, place) for place, size in enumerate(SIZES)}
    if rank < 2:
        for size, tag in tags.items():
            transport.send(2, tag, numbers(size) + rank)
        transport.send_object(2, make_tag(Kind.OBJECT, 0, 0), {"from": rank, "text": "x" * 100_000})
        return
    for source in (0, 1):
        for size, tag in reversed(tags.items()):
            transport.wait_any([(1 - source, NEVER), (source, tag)])
            found = transport.take(source, tag, (size,), (), torch.float32)
            assert found is not None and torch.equal(found, numbers(size) + source)
        assert transport.receive_object(source, make_tag(Kind.OBJECT, 0, 0))["from"] == source
    assert transport.take(0, tags[1], (1,), (), torch.float32) is None
    assert not transport.comes_within([(0, tags[1])], 0.01)


def wait_for_gradient(transport: HostsTransport) -> Callable[[], None]:
    def expect() -> None:
        transport.wait_any(gradient_messages(2, BACK))

    return expect


def run_gradients(transport: HostsTransport, rank: int) -> None:
    for used in (True, False):
        if rank == 0:
            h = numbers(6).requires_grad_()
            transport.send(2, FORWARD, h)
            twice = 2 * h
            token = transport.send_edge(twice, 2, BACK, wait_for_gradient(transport))
            torch.autograd.backward([token], [token.detach()])
            assert (h.grad is not None) == used
            assert h.grad is None or torch.equal(h.grad, 2 * numbers(6))
        elif rank == 2:
            received = transport.receive(0, FORWARD, 6, torch.float32)
            mine, token = transport.receive_edge(received, 0, BACK)
            loss = (mine * numbers(6)).sum() if used else torch.zeros(1, requires_grad=True).sum()
            torch.autograd.backward([loss, token], [loss.detach().new_ones(()), token.detach()])


def run_messages(hosts: str) -> None:
    init_on(hosts)
    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    earlier = opened(group)
    run_in_any_order(earlier, rank)
    earlier.flush()
    earlier.close()
    transport = opened(group)  # which gets all that comes from now on
    run_in_any_order(transport, rank)
    run_gradients(transport, rank)
    if rank == 0:
        transport.send(2, FORWARD, numbers(3))
        transport.send_object(1, ABORT, "rank 0 has seen enough")
    elif rank == 1:
        with pytest.raises(PeerFailed, match="rank 0 has seen enough"):
            transport.wait_any([(2, FORWARD)])
    else:
        with pytest.raises(dist.DistBackendError, match=r"has 12 bytes, the receiver expected 16"):
            transport.receive(0, FORWARD, 4, torch.float32)
    transport.flush()
    dist.barrier()
    transport.close()


def run_without_flush(hosts: str) -> int:
    """How many sends are kept when all but those of the last tensor are known to have left."""
    init_on(hosts)
    transport = opened(dist.group.WORLD)
    if dist.get_rank() == 0:
        for _ in range(3):
            transport.send(1, FORWARD, numbers(300_000))
            for work, _ in transport._outbox._leaving:
                work.wait()
    else:
        for _ in range(3):
            transport.receive(0, FORWARD, 300_000, torch.float32)
    kept = len(transport._outbox)
    dist.barrier()
    transport.close()
    return kept


def run_into_silence(hosts: str) -> str:
    """Rank 0 sends nothing, and is named."""
    init_on(hosts)
    group: Any = dist.new_group()
    transport = opened(group)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    meet_in_store("opened")
    if rank == 0:
        store.wait(["told"], timedelta(seconds=PATIENCE))
        return ""
    group.set_timeout(timedelta(seconds=1))
    with pytest.raises(dist.DistBackendError) as error:
        transport.wait_any([(0, FORWARD)])
    store.set("told", "")
    return str(error.value)


@pytest.mark.parametrize("hosts", ["abb", "aba", "abc"])
def test_messages_are_seen_when_they_have_come_and_taken_in_any_order(hosts: str) -> None:
    values(run_once(3, run_messages, hosts, backend=None))


def test_what_has_left_is_let_go_also_where_nothing_is_flushed() -> None:
    # of six: a letter and its tensor, before which the letter may have left
    assert values(run_once(2, run_without_flush, "ab", backend=None))[0] in {1, 2}


def test_a_rank_that_sends_nothing_within_the_timeout_is_named() -> None:
    text = values(run_once(2, run_into_silence, "ab", backend=None))[1]
    assert re.search(r"nothing came in 0:00:01: rank 1 on \S+ in a receive from rank 0 on \S+ \(", text), text
