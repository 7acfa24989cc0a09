"""Hooks of every kind, on modules and on tensors."""

# mypy: disable-error-code="no-untyped-call, index"
# some of torch's own functions have no annotations, or none that fit hooks
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.models.case import Case, Layers

__all__ = ["CASES"]


class Chain(Layers):
    """Three layers and a head in a row."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return out


def forward_hooks() -> nn.Module:
    model = Chain()
    model.first.register_forward_hook(lambda module, given, out: out * 1.1)
    model.second.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
    model.second.register_forward_hook(lambda module, given, out: out + given[0].mean(1, keepdim=True))
    model.third.register_forward_hook(
        lambda module, given, named, out: out - given[0] * 0.1, with_kwargs=True, prepend=True
    )
    model.register_forward_hook(lambda module, given, out: out * 2)
    return model


def backward_hooks() -> nn.Module:
    model = Chain()
    model.second.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    model.third.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    model.head.register_full_backward_hook(lambda module, into, out: None)
    return model


class TensorHooks(Chain):
    """Hooks on placed tensors change gradients; retain_grad keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.first(x))
        a.register_hook(lambda gradient: gradient * 0.5)
        b = self.second(a)
        b.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        b.retain_grad()
        handle = b.register_hook(lambda gradient: gradient * 100)
        handle.remove()
        out: Tensor = self.head(self.third(b) + a)
        return out


def parameter_hooks() -> nn.Module:
    model = Chain()
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    model.third.bias.register_hook(lambda gradient: gradient.flip(0))
    return model


def accumulation_hooks() -> nn.Module:
    """A hook that counts how often a gradient has been added."""
    model = Chain()
    counted = torch.zeros(())
    model.second.register_buffer("added", counted)

    def count(parameter: Any) -> None:
        assert parameter.grad is not None
        counted.add_(1)

    model.second.weight.register_post_accumulate_grad_hook(count)
    return model


CASES = (
    Case("forward hooks", forward_hooks),
    Case("full backward hooks", backward_hooks),
    Case("tensor hooks", TensorHooks, whole=False, replicas=False),
    Case("parameter hooks", parameter_hooks, whole=False),
    Case("hooks after accumulation", accumulation_hooks, whole=False),
)
