"""Functions that begin a backward of their own are known by what they do, and never wait in a second part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd import backward as run_through
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from opensmd.modelparallel.runtime.backward.inner_backwards import begins_backward
from opensmd.modelparallel.runtime.backward.weight_gradients import first_part
from opensmd.modelparallel.runtime.messages.edges import receive_edge


class Doubled(Function):
    """2 x, by a subclass's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x


class DoubledForCheckpoint(Doubled):
    """Its name is all that it has of a checkpoint."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Again(Doubled):
    """Goes through its forward again, as a reentrant checkpoint does."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        return twice_again(*ctx.saved_tensors, *gradients)


class AgainOnce(Doubled):
    """The same behind a decorator of torch's."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        return twice_again(*ctx.saved_tensors, *gradients)


class AgainByMethod(Doubled):
    """The same by the tensor's own method, inside a function of its own."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()

        def go() -> None:
            with torch.enable_grad():
                (2 * leaf).backward(gradients[0])

        go()
        gradient: Tensor | None = leaf.grad
        return gradient


class ByVjp(Doubled):
    """The other name that torch has for a backward."""

    @staticmethod
    def vjp(ctx: Any, *gradients: Tensor) -> Tensor | None:
        return twice_again(*ctx.saved_tensors, *gradients)


def twice_again(x: Tensor, gradient: Tensor) -> Tensor | None:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        run_through(2 * leaf, gradient)
    return leaf.grad


FUNCTIONS: list[tuple[type[Function], bool]] = [
    (DoubledForCheckpoint, False),
    (Again, True),
    (AgainOnce, True),
    (AgainByMethod, True),
    (ByVjp, True),
]


def test_torchs_own_reentrant_checkpoint_is_known() -> None:
    context: Callable[[], Any] = CheckpointFunction._backward_cls
    assert begins_backward(context())


@pytest.mark.parametrize(("function", "begins"), FUNCTIONS)
def test_only_what_begins_no_backward_of_its_own_waits_for_the_second_part(
    function: type[Function], begins: bool
) -> None:
    scale, weight = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.eye(4))
    received, token = receive_edge(torch.ones(4, 4), lambda gradient: None)
    loss = (received @ weight * function.apply(scale)).sum()  # type: ignore[no-untyped-call]
    split = first_part([loss, token], [torch.ones(()), token.detach()], everything=False)
    assert split is not None
    split.run_first()
    assert weight.grad is None
    assert (scale.grad is not None) is begins
    split.run_weights()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((4, 4), 24.0))
    assert scale.grad is not None and float(scale.grad) == 32.0
