"""Two ends of a connection in one process: matching, order, flow, death and farewell of messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from opensmd.legacy._torch_internals import private_group
from opensmd.legacy.transports import messages
from opensmd.legacy.transports.device_messages import DeviceMessages
from opensmd.legacy.transports.engine import WIRES
from opensmd.legacy.transports.messages import DTYPES, HEADER, Messages, Peer
from tests.support.patience import PATIENCE, wait_until

Ends = tuple[Messages, Messages, Messages]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Three ranks; rank 2 is connected with rank 0 alone."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    made = Messages({1: a, 2: c}, 0, PATIENCE), Messages({0: b}, 1, PATIENCE), Messages({0: d}, 2, PATIENCE)
    yield made
    for one in made:
        one.close()


def test_a_receive_for_one_rank_leaves_the_messages_of_others(ends: Ends) -> None:
    zero, one, two = ends
    for sender, value in ((two, 2.0), (one, 1.0)):
        sender.send(torch.full((3,), value), 0)
    tensor = torch.zeros(3)
    receive = zero.irecv(tensor, 1)
    receive.wait()
    assert tensor.tolist() == [1, 1, 1]
    receive = zero.irecv(tensor, None)
    receive.wait()
    assert (receive.sender, tensor.tolist()) == (2, [2, 2, 2])


def test_receives_are_served_in_the_order_in_which_they_were_posted(ends: Ends) -> None:
    zero, one, _ = ends
    tensors = [torch.zeros(2) for _ in range(4)]
    receives = [
        zero.irecv(tensor, source) for tensor, source in zip(tensors, (1, None, 1, None), strict=True)
    ]
    for value in range(4):
        one.send(torch.full((2,), float(value)), 0)
    for receive in receives:
        receive.wait()
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2, 3]


def test_a_sender_far_ahead_waits_and_nothing_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PILE_LIMIT", 1 << 20)
    zero, one, _ = ends
    count, parts = 100_000, 40
    writer = threading.Thread(
        target=lambda: [one.send(torch.full((count,), float(part)), 0) for part in range(parts)]
    )
    writer.start()
    writer.join(1.0)
    assert writer.is_alive(), "16 MB were taken in although nobody asked for them"
    tensor = torch.zeros(count)
    for part in range(parts):
        zero.irecv(tensor, 1).wait()
        assert tensor.eq(part).all()
    writer.join(PATIENCE)
    assert not writer.is_alive()


def test_sizes_and_dtypes_are_compared_whoever_comes_first(ends: Ends) -> None:
    zero, one, _ = ends
    early = zero.irecv(torch.zeros(3), 1)
    one.send(torch.zeros(4), 0)
    with pytest.raises(RuntimeError, match=r"do not match: rank 1 sent 4 elements.*rank 0 expects 3"):
        early.wait()
    one.send(torch.zeros(3), 0)
    one.send(torch.ones(1), 0)
    with pytest.raises(RuntimeError, match=r"float32, recv on rank 0 expects 3 of torch.float64"):
        zero.irecv(torch.zeros(3).double(), 1).wait()
    tensor = torch.zeros(1)
    zero.irecv(tensor, 1).wait()
    assert tensor.item() == 1


def test_what_was_sent_before_the_end_comes_and_later_receives_fail_at_once(ends: Ends) -> None:
    zero, one, two = ends
    waiting = zero.irecv(torch.zeros(1), 1)
    anybody = zero.irecv(torch.zeros(1), None)
    one.send(torch.ones(1), 0)
    one.close()
    waiting.wait()
    with pytest.raises(RuntimeError, match="rank 1 has closed its connection"):
        zero.irecv(torch.zeros(1), 1).wait()
    assert not anybody.is_completed()
    two.close()
    with pytest.raises(RuntimeError, match="every other rank has closed"):
        anybody.wait()


def test_half_a_message_of_a_rank_that_has_ended_is_no_message() -> None:
    mine, theirs = socket.socketpair()
    zero = Messages({1: mine}, 0, PATIENCE)
    theirs.sendall(HEADER.pack(2, DTYPES.index(torch.float32)) + bytes(4))
    wait_until(lambda: any(arrival.got for arrival in tuple(zero._pile)))
    theirs.close()
    wait_until(lambda: zero._peers[1].closed)
    with pytest.raises(RuntimeError, match="rank 1 has closed its connection"):
        zero.recv(torch.zeros(2), 1)
    zero.close()


def test_a_message_is_delivered_once_even_if_the_reader_is_slow(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receive comes when all has been read, and before the reader has noted that."""
    zero, one, _ = ends
    taken, finish = threading.Event(), Messages._finish_if_complete

    def finish_late(self: Messages, peer: Peer) -> None:
        if self is zero and peer.reading is not None and peer.reading.complete:
            taken.wait(PATIENCE)
        finish(self, peer)

    monkeypatch.setattr(Messages, "_finish_if_complete", finish_late)
    one.send(torch.ones(3), 0)
    wait_until(lambda: any(arrival.complete for arrival in tuple(zero._pile)))
    receive = zero.irecv(torch.zeros(3), 1)
    assert not receive.is_completed(), "what the reader writes now would change a tensor in use"
    taken.set()
    receive.wait()


def test_a_receive_that_nobody_serves_ends_at_its_timeout() -> None:
    mine, theirs = socket.socketpair()
    lonely = Messages({1: mine}, 0, 0.2)
    with pytest.raises(RuntimeError, match=r"recv on rank 0 from rank 1: nothing came within 0\.2 s"):
        lonely.recv(torch.zeros(1), 1)
    partner = Messages({0: theirs}, 1, PATIENCE)
    partner.send(torch.ones(1), 0)
    lonely._timeout = PATIENCE
    tensor = torch.zeros(1)
    lonely.recv(tensor, 1)
    assert tensor.item() == 1, "the receive that gave up has not swallowed the message"
    lonely.close()
    partner.close()


def test_a_send_that_nobody_takes_ends_at_its_timeout() -> None:
    mine, theirs = socket.socketpair()
    hasty = Messages({1: mine}, 0, 0.3)
    large = torch.zeros(4_000_000)
    with pytest.raises(RuntimeError, match=r"send on rank 0 to rank 1: not taken within 0\.3 s"):
        hasty.send(large, 1)
    with pytest.raises(RuntimeError, match="send on rank 0: rank 1 has closed its connection"):
        hasty.send(torch.zeros(1), 1)
    hasty.close()
    theirs.close()


def test_messages_of_nccl_go_through_its_group_and_need_a_source() -> None:
    """As far as a CPU allows: the same code over a Gloo group of threads."""
    store = torch.distributed.HashStore()
    wire = WIRES["gloo"]

    def rank(own: int, results: dict[int, object]) -> None:
        group = private_group("gloo", store=store, name="pair", rank=own, ranks=[0, 1], timeout=PATIENCE)
        ends = DeviceMessages(group, wire)
        turned = torch.zeros(3, 2, dtype=torch.int16).t()
        if own == 0:
            request = ends.isend(torch.arange(6, dtype=torch.int16).reshape(2, 3), 1)
            request.wait()
            assert request.is_completed()
            ends.send(torch.ones(2), 1)
        else:
            request = ends.irecv(turned, 0)
            request.wait()
            assert request.is_completed()
            last = torch.zeros(2)
            assert ends.recv(last, 0) == 0
            with pytest.raises(RuntimeError, match="DataChannelNccl does not support recv from any source"):
                ends.recv(last, None)
            results[1] = (turned.tolist(), last.tolist())
        ends.close()

    results: dict[int, object] = {}
    threads = [threading.Thread(target=rank, args=(own, results)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {1: ([[0, 1, 2], [3, 4, 5]], [1.0, 1.0])}
