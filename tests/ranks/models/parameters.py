"""Parameters outside their modules' forwards, frozen parameters, and parts without gradients."""

# mypy: disable-error-code="no-any-return"
# some of torch's own functions have no annotations
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from tests.ranks.models.case import WIDTH, Batch, Case, Chain, Layers, cross_entropy, plain_module

__all__ = ["CASES"]


class Borrowed(Layers):
    """Weights of other modules are used in functions; a penalty sums over all parameters."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        h = F.linear(h, self.first.weight, self.first.bias) + self.second.bias
        penalty = sum(parameter.pow(2).sum() for parameter in self.parameters())
        out: Tensor = self.head(h @ self.third.weight.t()) + penalty * 1e-2
        return out


class Reader(nn.Module):
    """Is given another module, whose weight it reads, as DoRA's layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, other: nn.Linear) -> Tensor:
        out: Tensor = x * self.scale / other.weight.norm(dim=1)
        return out


class Read(Layers):
    """A small weight that a module without children reads, far from the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = nn.Sequential(*[nn.Linear(40 * WIDTH, 40 * WIDTH) for _ in range(2)])
        self.reader = Reader()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.second(self.bulk(h.repeat(1, 40))[:, :WIDTH] + h)
        out: Tensor = self.head(self.reader(self.third(h), self.first))
        return out


def decayed_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weight decay written into the loss."""
    module = plain_module(model)
    decay = torch.stack([parameter.pow(2).mean() for parameter in module.parameters()]).sum()
    norms = torch.norm(torch.cat([parameter.flatten() for _, parameter in module.named_parameters()]))
    return cross_entropy(model, x, y) + decay * 0.01 + norms * 1e-3


def far_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss uses a weight of the first stage after the last one."""
    logits = model(x)
    return F.cross_entropy(logits + (x @ plain_module(model).first.weight)[:, :4], y)


class Frozen(Layers):
    """Frozen layers before, between and after trained ones; a part under no_grad; detached values."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        assert not h.requires_grad
        with torch.no_grad():
            target = self.second(h) + self.extra(h)
        assert not target.requires_grad
        g = self.second(self.extra(h))
        with torch.enable_grad():
            k = self.third(g)
        out: Tensor = self.head(k + target + g.detach() * 0.5)
        return out


def trunk_frozen() -> nn.Module:
    """Nothing before the head is trained: no gradient crosses a stage."""
    model = Chain()
    for layer in (model.first, model.second, model.third):
        layer.requires_grad_(False)
    return model


def head_frozen() -> nn.Module:
    """Only the first layer is trained: gradients pass through the others."""
    model = Chain()
    for layer in (model.second, model.third, model.head):
        layer.requires_grad_(False)
    return model


class Detached(Layers):
    """Stages whose results are used without gradients, and one whose gradient is stopped by inference."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        side = self.second(h).detach()
        h = self.third(h.detach())
        out: Tensor = self.head(h + side.data)
        return out


class Meaning(Layers):
    """New leaves inside forward: requires_grad_ on an input and on a detached placed value."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = self.second(torch.tanh(self.first(x)))
        fresh = h.detach().requires_grad_()
        out: Tensor = self.head(self.third(h) + self.third(fresh))
        return out


class MadeWeights(Layers):
    """Weights that torch's hooks make before each forward, first on their stages."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.weight_norm(self.second)  # type: ignore[no-untyped-call]
        self.third = nn.utils.spectral_norm(self.third)
        prune.l1_unstructured(self.head, "weight", amount=0.25)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.third(h)))
        return out


class Rivals(Layers):
    """A maker and a judge of what it has made; each is frozen while the other one learns."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.third(made)))
        return out


def in_turn(case: Case, model: Any, backward: Callable[..., None], batch: Batch) -> Tensor:
    """A backward for either; the maker is left frozen."""
    x, y = batch
    module = plain_module(model)
    maker, judge = (module.first, module.second), (module.third, module.head)
    losses = []
    for factor, learning, frozen in ((1.0, maker, judge), (-0.7, judge, maker)):
        for one in learning:
            one.requires_grad_(True)
        for one in frozen:
            one.weight.requires_grad = False
            one.bias.requires_grad_(False)
        loss = factor * case.loss(model, x, y)
        backward(loss)
        losses.append(loss.detach())
    return losses[0] + losses[1]


TAUGHT = ("first", "taught.0", "second", "taught.1", "third", "taught.2", "head")


class Teacher(Layers):
    """Compares with a moving average of its own weights, which the forward brings up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.taught = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.taught.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.follow(x)
            wanted = x
            for one in self.taught:
                wanted = torch.tanh(one(wanted))
        h = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        out: Tensor = self.head(h)
        return out + F.mse_loss(h, wanted)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        students = nn.ModuleList([self.first, self.second, self.third])
        return zip(self.taught.parameters(), students.parameters(), strict=True)

    def follow(self, x: Tensor) -> None:
        for mine, other in self.pairs():
            mine.data = mine.data * 0.9 + other.data * 0.1


class TeacherInPlace(Teacher):
    """The same in place, after a value that the dry run has to compute."""

    def follow(self, x: Tensor) -> None:
        share = 0.1 if x.sum().item() < 1e9 else 1.0
        for mine, other in self.pairs():
            mine.mul_(1 - share).add_(other, alpha=share)


CASES = (
    Case("borrowed weights", Borrowed),
    Case("weight decay in the loss", Chain, loss=decayed_loss),
    Case("weight decay in the loss, placed automatically", Chain, (), loss=decayed_loss),
    Case("a far weight in the loss", Chain, loss=far_loss),
    Case("a far weight read by a module", Read, ()),
    Case("frozen layers", Frozen),
    Case("frozen trunk", trunk_frozen),
    Case("frozen head", head_frozen),
    Case("detached values", Detached, settings={"find_unused_parameters": True}),
    Case("new leaves", Meaning),
    Case("weights made by hooks", MadeWeights, whole=False, replicas=False),
    Case("frozen in turn", Rivals, train=in_turn, microbatches=(1,), replicas=False),
    Case("moving average of weights", Teacher, TAUGHT, whole=False, replicas=False),
    Case("moving average in place", TeacherInPlace, TAUGHT, whole=False, replicas=False),
)
