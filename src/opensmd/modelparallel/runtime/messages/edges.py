"""Where autograd crosses from one rank to another.

A sent tensor gets a token on the sender and one on the receiver; backward starts at all tokens of this rank's
part of the graph. torch runs a thread's nodes in descending order of creation, and both ends create theirs at
the same program point. So each waits for what the other is about to send, whatever the topology. A missing
gradient is announced as such and never replaced by zeros::

    rank 0    h ──────── _Send ──── token ◄── backward begins here, and waits for the message
                                      :
    forward   h's data, message n     :  backward   gradient, or that there is none, message n
                                      ▼
    rank 1    received ─ _Receive ─┬─ h ── ... ── loss ◄── backward begins here
                                   └─ token ◄── and here: also where no gradient comes to h

On an accelerator, a thread of the device runs the nodes whose gradients are on it. Tokens are on the device
of the messages, so that all edges of a rank are nodes of one thread.

These are the edges of transports without a mailbox. The mailbox has its own, without Python in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opensmd.native import core

__all__ = ["RECEIVED", "keeps_gradient", "receive_edge", "send_edge"]

ReceiveGradient = Callable[[], Tensor | None]
SendGradient = Callable[[Tensor | None], None]


class _Send(torch.autograd.Function):
    """Forward: the tensor has been sent. Backward: receive its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, receive: ReceiveGradient, device: torch.device | None) -> Tensor:
        ctx.receive = receive
        return tensor.new_empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.receive(), None, None


class _Receive(torch.autograd.Function):
    """Forward: a tensor has come. Backward: send back its gradient, or that there is none.

    The step's backward also starts at the token. One inside it (of a reentrant checkpoint whose function uses
    the tensor without taking it as an argument) does not: its gradient waits for the step's backward, because
    the sender takes only one.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, received: list[Tensor], send: SendGradient, device: torch.device | None
    ) -> tuple[Tensor, Tensor]:
        ctx.send = send
        ctx.early = None
        ctx.set_materialize_grads(False)
        mine = received[0].detach()  # not a view of the message's memory: the program may write into it
        return mine, mine.new_empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> Any:
        if gradient is not None:
            ctx.early = gradient if ctx.early is None else ctx.early + gradient
        if token is not None:
            ctx.send(ctx.early)
            ctx.early = None
        return None, None, None, None


# Bypasses the Python part of Function.apply, which costs as much again and which a step redirects for users.
_apply_send: Callable[..., Any] = super(torch.autograd.Function, _Send).apply
_apply_receive: Callable[..., Any] = super(torch.autograd.Function, _Receive).apply
RECEIVED = frozenset({_Receive._backward_cls.__name__, "OpenSMDReceived"})  # nodes, here and in the mailbox
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def send_edge(tensor: Tensor, receive: ReceiveGradient, device: torch.device | None = None) -> Tensor:
    """Return the sender's token; in backward, ``receive`` returns the gradient, or None.

    Args:
        device: that of the token; by default, that of the tensor.
    """
    token: Tensor = _apply_send(tensor, receive, device)
    return token


def receive_edge(
    received: Tensor, send: SendGradient, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the received tensor as part of the graph, and the receiver's token.

    Args:
        device: that of the token; by default, that of the tensor.
    """
    tensor, token = _apply_receive(_ANCHOR, [received], send, device)
    return tensor, token


def keeps_gradient(token: Tensor) -> bool:
    """Whether a received tensor, given its token of either kind, has a gradient that was not sent back."""
    node: Any = token.grad_fn
    if type(node).__name__ == _Receive._backward_cls.__name__:
        return node.early is not None
    return core.keeps_gradient(token)
