"""Edges of autograd between two ranks, those of the mailbox and those for any process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.runtime.messages.group_transport import GroupTransport
from opensmd.modelparallel.runtime.messages.mailbox_transport import MailboxTransport
from opensmd.modelparallel.runtime.messages.message import Kind, gradient_messages, make_tag
from opensmd.modelparallel.runtime.messages.transport import Transport
from tests.support.ranks import RankPool

FORWARD, BACK = make_tag(Kind.TENSOR, 0, 1), make_tag(Kind.GRADIENT, 0, 1)
SHAPES = [(3,), (2, 5), (0, 4), (300, 400)]  # the last one lies in a block


class Stop(BaseException):
    """What a microbatch is ended with is no Exception either."""


def transports() -> list[Transport]:
    group = dist.group.WORLD
    assert group is not None
    return [MailboxTransport(group), GroupTransport(dist.new_group(backend="gloo"), torch.device("cpu"))]


def expecting(transport: Transport, source: int) -> Callable[[], None]:
    def expect() -> None:
        transport.wait_any(gradient_messages(source, BACK))

    return expect


def sent(transport: Transport, tensor: Tensor) -> Tensor:
    transport.send(1, FORWARD, tensor.detach())
    return transport.send_edge(tensor, 1, BACK, expecting(transport, 1))


def received(transport: Transport, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    found = transport.take(0, FORWARD, shape, (), torch.float32)
    while found is None:
        transport.wait_any([(0, FORWARD)])
        found = transport.take(0, FORWARD, shape, (), torch.float32)
    return transport.receive_edge(found, 0, BACK)


def backward(starts: list[Tensor], gradients: list[Tensor] | None = None, *, keep: bool = False) -> None:
    given = gradients or [start.detach() for start in starts]
    torch.autograd.backward(starts, given, retain_graph=keep)


def run_gradients_come_back() -> None:
    for transport in transports():
        for shape in SHAPES:
            torch.manual_seed(0)
            leaf = torch.randn(shape, requires_grad=True)
            if dist.get_rank() == 0:
                token = sent(transport, leaf * 3)
                assert token.shape == (0,) and token.requires_grad
                backward([token], keep=True)
                backward([token])
                assert torch.equal(leaf.grad, torch.full(shape, 12.0))  # type: ignore[arg-type]
            else:
                tensor, token = received(transport, shape)
                assert torch.equal(tensor, leaf.detach() * 3) and tensor.requires_grad
                tensor.mul_(2)  # the message's memory may be written into
                loss = tensor.sum()
                backward([loss, token], [torch.tensor(1.0), token.detach()], keep=True)
                backward([loss, token], [torch.tensor(1.0), token.detach()])
        transport.flush()


def run_no_gradient_is_told_as_none() -> None:
    for transport in transports():
        leaf = torch.ones(2, requires_grad=True)
        if dist.get_rank() == 0:
            backward([sent(transport, leaf * 3)])
            assert leaf.grad is None
        else:
            tensor, token = received(transport, (2,))
            assert tensor.requires_grad
            backward([token])
        transport.flush()


def run_a_conjugate_travels_as_what_it_means() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j]).conj()
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    for transport in transports():
        for value in (values, negative):
            if dist.get_rank() == 0:
                transport.send(1, FORWARD, value)
            else:
                plain = value.resolve_conj().resolve_neg()
                assert torch.equal(transport.receive(0, FORWARD, 2, value.dtype), plain)
        transport.flush()


def run_what_waiting_raises_comes_out_of_backward() -> None:
    for transport in transports():
        if dist.get_rank() == 0:

            def refuse() -> None:
                raise Stop("enough")

            leaf = torch.ones(2, requires_grad=True)
            token = transport.send_edge(leaf * 3, 1, BACK, refuse)
            with pytest.raises(Stop, match="enough"):
                backward([token])
            backward([torch.ones((), requires_grad=True) * 2])  # and autograd works on


CASES = [
    run_gradients_come_back,
    run_no_gradient_is_told_as_none,
    run_a_conjugate_travels_as_what_it_means,
    run_what_waiting_raises_comes_out_of_backward,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("run_"))
def test_edges(pool: Callable[[int], RankPool], case: Callable[[], None]) -> None:
    pool(2).run(case)
