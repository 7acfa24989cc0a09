"""Steps that call the model or backward several times; retained graphs and given gradients."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
# some of torch's own functions have no annotations
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Batch, Case, Layers, plain_module

__all__ = ["CASES"]

Backward = Callable[..., None]


class Chain(Layers):
    """Three layers and a head in a row."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.third(h)))
        return out


def two_calls_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A consistency loss between two calls."""
    one, two = model(x), model(x * 0.5)
    return F.cross_entropy(one, y) + F.mse_loss(two, one.detach()) + F.mse_loss(model(x + 1), one)


def chained_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The result of one call is the input of the next."""
    logits = model(x)
    for _ in range(2):
        logits = model(F.pad(logits, (0, WIDTH - CLASSES)) + x)
    return F.cross_entropy(logits, y)


def children_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Children of the model are called outside its forward."""
    module = plain_module(model)
    h = module.third(torch.tanh(module.first(x)))
    return F.cross_entropy(module.head(h) + model(x), y)


def no_call_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Only a child is called, and a loss of the inputs added."""
    return F.cross_entropy(plain_module(model).head(x), y) + x.mean()


def two_backwards(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    x, y = batch
    first = F.cross_entropy(model(x), y)
    backward(first)
    second = model(x * 2).pow(2).mean()
    backward(second)
    return first + second.detach()


class Lending(Layers):
    """The weight of the first layer is used twice more, after the others."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        out: Tensor = self.head(torch.tanh(h @ self.first.weight) @ self.first.weight)
        return out


def several_roots(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
    backward([first, second])
    return first + second


def given_gradients(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    gradient = (torch.softmax(logits, 1) - F.one_hot(y, CLASSES)).detach() / len(x)
    backward(logits, gradient)
    return F.cross_entropy(logits, y)


def plain_backward(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    """The user forgot nothing but model.backward."""
    loss = case.loss(model, *batch)
    loss.backward()
    return loss


def retained(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
    first.backward(retain_graph=True)
    torch.autograd.backward(second)
    return first


def no_backward_at_first(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    """An evaluation inside the training step."""
    x, y = batch
    with torch.no_grad():
        before = model(x).mean()
    loss = F.cross_entropy(model(x), y) + before
    backward(loss)
    return loss


def switching_modes(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    """eval and train within a step, which works for one microbatch."""
    x, y = batch
    model.eval()
    with torch.no_grad():
        before = model(x).mean()
    model.train()
    loss = F.cross_entropy(model(x), y) + before
    backward(loss)
    return loss


class Adversary(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, *, fake: bool) -> Tensor:
        out: Tensor = self.discriminator(self.generator(x) if fake else x)
        return out


def adversarial(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    x, _ = batch
    module = plain_module(model)
    real, fake = model(x, fake=False), module.discriminator(module.generator(x).detach())
    judged = F.softplus(-real).mean() + F.softplus(fake).mean()
    backward(judged)
    made = F.softplus(-model(x, fake=True)).mean()
    backward(made)
    return judged + made


class Fed(Layers):
    """Its input goes into every layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x)) + x))
        out: Tensor = self.head(torch.tanh(self.third(h + x)) + x)
        return out


def climbing(case: Case, model: Any, backward: Backward, batch: Batch) -> Tensor:
    """Adversarial training: the input follows its own gradient, of which a half stays for the next one."""
    x, y = batch
    shift = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        backward(case.loss(model, x + shift, y))
        with torch.no_grad():
            shift.add_(shift.grad, alpha=4.0)
        shift.grad.mul_(0.5)
    loss = case.loss(model, x + shift.detach(), y)
    backward(loss)
    return loss


def mean_of_inputs(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss that no stage computes alone: the model's part is detached from the last stages."""
    module = plain_module(model)
    return module.first(x).pow(2).mean() + F.cross_entropy(module.head(x), y)


PARTS = ("generator.0", "generator.2", "discriminator.0", "discriminator.2")
UNUSED = {"find_unused_parameters": True}  # replicas ask for it

CASES = (
    Case("two calls", Chain, loss=two_calls_loss),
    Case("calls in a chain", Chain, loss=chained_loss),
    Case("children called outside", Chain, loss=children_loss),
    Case("no call of the model", Chain, loss=no_call_loss, automatic=False, settings=UNUSED),
    Case("independent parts", Chain, loss=mean_of_inputs, automatic=False, settings=UNUSED),
    Case("two backwards", Chain, train=two_backwards),
    Case("two backwards, a weight of another stage", Lending, train=two_backwards),
    Case("several roots", Chain, train=several_roots),
    Case("given gradients", Chain, train=given_gradients),
    Case("loss.backward()", Chain, train=plain_backward, averaged=False, whole=False),
    Case("retained graph", Chain, train=retained, averaged=False, whole=False),
    Case("evaluation inside a step", Chain, train=no_backward_at_first),
    Case("modes switched inside a step", Chain, train=switching_modes, microbatches=(1,)),
    Case("gradients of inputs", Fed, train=climbing, whole=False, replicas=False),
    Case("generator and discriminator", Adversary, PARTS, train=adversarial, settings=UNUSED),
)
