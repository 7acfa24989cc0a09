"""What forwards fill and reset outside of modules: caches, contexts, globals, classes, closures."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart

WIDTH, MICROBATCHES, LAYERS = 6, 4, 6


class Store:
    """Maps of attention, emptied for each forward."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.maps: list[Tensor] = []
        self.step = 0

    def add(self, given: Tensor) -> None:
        self.step += 1
        self.maps.append(self.step * given.square().mean())

    def total(self) -> Tensor:
        return torch.stack(self.maps).sum() * self.step


class SlottedStore(Store):
    __slots__ = ("maps", "step")


class Equal(Store):
    """Cannot be a key, and is compared by what is in it."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class Meter:
    """Goes on from microbatch to microbatch."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1


class Controller:
    """Has stores, and passes what it is given to one of them."""

    def __init__(self, store: Store) -> None:
        self.stores: dict[str, list[Store]] = {"down": [store], "up": [Store()]}

    def __call__(self, given: Tensor) -> None:
        self.stores["down"][0].add(given)
        self.stores["up"][0].add(given)


class Losses(list[Tensor]):
    """A list of a class of the script."""


STORE = Store()
AUXILIARY: list[Tensor] = []
TABLES: dict[int, Tensor] = {}


def shared_by_calls() -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward with a variable that only its closure has: the mean of what the first layer is given."""
    mean = None

    def shifted(layer: nn.Module, x: Tensor) -> Tensor:
        nonlocal mean
        if layer.is_first:
            mean = x.mean(0)
        return x - mean

    return shifted


class Layer(nn.Linear):
    """Finds what layers of the other partition have made: constants, and two tensors of each microbatch."""

    controller: Controller
    offsets: ClassVar[Tensor | None] = None
    shifted = shared_by_calls()

    def __init__(self, *, is_first: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.arange(float(len(x)))[:, None].expand(-1, WIDTH)
        if Layer.offsets is None:
            Layer.offsets = torch.linspace(0, 1, WIDTH)
        if self.is_first:
            self.context.strong = x.abs() > 0.5  # type: ignore[union-attr]
        given = self.shifted(x * self.context.strong) + Layer.offsets  # type: ignore[union-attr, operator]
        out = torch.tanh(super().forward(given / (1 + TABLES[len(x)])))
        self.controller(out)
        AUXILIARY.append(out.mean())
        return out * self.context.scale  # type: ignore[operator, union-attr, no-any-return]


class Context:
    def __init__(self) -> None:
        self.scale, self.mask = 1.0, None


class Net(nn.Module):
    """Uses all of them, in itself, in its layers and in hooks, and attributes of its class."""

    scale: ClassVar[float] = 1.0
    positive: ClassVar[Tensor | None] = None
    means: ClassVar[list[Tensor]] = []

    def __init__(self, kind: type[Store]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(is_first=not n) for n in range(LAYERS))
        self.store, self.context, self.meter = kind(), Context(), Meter()
        self.losses, self.others, features = Losses(), UserList[Tensor](), Store()
        for layer in self.layers:
            layer.controller, layer.context = Controller(self.store), self.context
            layer.register_forward_hook(lambda module, given, out: features.add(out))
        self.features = lambda: features

    def forward(self, x: Tensor) -> Tensor:
        features = self.features()
        for each in (self.losses, self.others, self.means, AUXILIARY):
            each.clear()
        Net.scale, type(self).positive = x.abs().sum().item(), x > 0.5
        features.reset()
        if self.context.mask is None:
            self.context.mask = x > 0
        self.context.scale = x.abs().max().item()
        for layer in self.layers:
            x = layer(x)
            STORE.add(x)
            x = x * Net.scale + x * type(self).positive
            for kept in (self.losses, self.others, self.means):
                kept.append(x.square().mean())
        stores = [self.store, STORE, features, *self.layers[0].controller.stores["up"]]
        kept = [*self.losses, *self.others, *self.means, *AUXILIARY]
        out: Tensor = (x * self.context.mask).mean() + torch.stack(
            [*(each.total() for each in stores), *kept]
        ).sum()
        for layer in self.layers:
            layer.controller.stores["up"][0].reset()
        for each in (self.store, STORE):
            each.reset()
        self.context.mask = None
        self.meter.update(out.item())
        return out


def trained(kind: type[Store], looped: bool, pipeline: str) -> None:
    restart(
        partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0, pipeline=pipeline
    )
    module, plain = Net(kind), Net(kind)
    Layer.offsets = None
    TABLES.clear()
    for number, layer in enumerate(module.layers):
        smp.set_partition(layer, number % 2 if looped else 2 * number // LAYERS)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2 * MICROBATCHES, WIDTH, generator=generator),) for _ in range(3)]
    train_beside(
        smp.DistributedModel(module),
        plain,
        batches,
        microbatches=MICROBATCHES,
        loss=lambda model, x: model(x),
    )
    assert module.meter.count == plain.meter.count
    assert module.meter.sum == pytest.approx(plain.meter.sum, rel=1e-4)
    smp.shutdown()


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize(("kind", "looped"), [(Store, True), (SlottedStore, False), (Equal, True)])
def test_objects_that_forwards_fill_are_each_microbatchs_own(
    pool: Pools, kind: type[Store], looped: bool, pipeline: str
) -> None:
    pool(2).run(trained, kind, looped, pipeline)


class Tables(nn.Module):
    """Every call returns what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.arange(float(WIDTH)))
        self.plain = torch.ones(WIDTH)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.offset, self.plain


class Looking(nn.Module):
    """Calls a module of the first stage again and again between layers of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = Tables()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight, offset, plain = self.tables()
            x = torch.tanh(layer(x)) * weight + offset - plain
        return x


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model(x).abs().mean()
    loss: Tensor = (model(x) * scale).square().mean()
    return loss


def looked_up() -> None:
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    module, plain = Looking(), Looking()
    for layer in module.layers[2:]:
        smp.set_partition(layer, 1)
    batches = [(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)] * 2
    train_beside(smp.DistributedModel(module), plain, batches, microbatches=2, loss=weighted)
    smp.shutdown()


def test_a_module_may_return_what_it_keeps_in_every_call(pool: Pools) -> None:
    pool(2).run(looked_up)
