"""torch.func inside modules, and cached parametrizations around them: models train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.nn.utils import parametrize

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart

WIDTH, MICROBATCHES = 6, 4


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Transforming(nn.Module):
    """Calls a network under a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def energy(self, x: Tensor) -> Tensor:
        return self.network(x).square().sum()


class Gradient(Transforming):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x - 0.1 * grad(self.energy)(x)
        return out


class Forward(Transforming):
    def forward(self, x: Tensor) -> Tensor:
        out, tangent = jvp(self.network, (x,), (torch.ones_like(x),))
        return out + tangent


class Backward(Transforming):
    def forward(self, x: Tensor) -> Tensor:
        out, pull = vjp(self.network, x)
        (pulled,) = pull(torch.ones_like(out))
        return out + pulled


class Mapped(Transforming):
    def forward(self, x: Tensor) -> Tensor:
        weights = {
            name: torch.stack([parameter, 2 * parameter])
            for name, parameter in self.network.named_parameters()
        }

        def one(chosen: dict[str, Tensor]) -> Tensor:
            return functional_call(self.network, chosen, x)

        out: Tensor = vmap(one)(weights).sum(0)
        return out


class Curved(Transforming):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + 0.1 * hessian(self.energy)(x[0]).sum(0)
        return out


class OfInputs(nn.Module):
    """Transforms what all ranks have between layers of several stages, and writes through one."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = torch.ones(2, WIDTH)
        vmap(lambda row, seen: row.mul_(seen + 2), in_dims=(0, None))(given, self.seen)
        vmap(lambda one: one.add_(1))(self.seen)
        out: Tensor = self.layers[1](torch.tanh(self.layers[0](x + given.mean(0))))
        return out


class Cached(nn.Module):
    """Uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Halved())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for layer in (*self.layers, *self.layers):
                x = torch.tanh(layer(x))
        return x


class OtherWeights(nn.Module):
    """Calls layers of several stages with other weights than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * parameter for name, parameter in self.layers.named_parameters()}
        return functional_call(self.layers, doubled, x)


class MadeWeights(nn.Module):
    """Makes the weights of layers from what layers of other stages return, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            (
                nn.Linear(WIDTH, WIDTH),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
                nn.Linear(WIDTH, WIDTH),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        h, g = torch.tanh(first(x)), torch.tanh(last(x))
        x = functional_call(middle, {"0.weight": h.T @ h + middle[0].weight}, (x,))
        x = functional_call(first, {"weight": g.T @ g + first.weight}, (x,))
        return functional_call(last, {"weight": first.weight, "bias": h.mean(0)}, (x,))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Around(nn.Module):
    """Between layers of other stages."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return out


def rows(seed: int) -> tuple[Tensor]:
    return (torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def trained(kind: Callable[[], nn.Module], places: dict[str, int]) -> None:
    by_hand = {"auto_partition": False, "default_partition": 0} if places else {}
    restart(partitions=max(places.values(), default=1) + 1, microbatches=MICROBATCHES, **by_hand)
    module, plain = Around(kind), Around(kind)
    for name, place in places.items():
        smp.set_partition(module.get_submodule(name), place)
    train_beside(smp.DistributedModel(module), plain, map(rows, range(2)), microbatches=MICROBATCHES)
    smp.shutdown()


@pytest.mark.parametrize("kind", [Gradient, Forward, Backward, Mapped, Curved])
def test_transforms_inside_a_module_of_one_partition_train(pool: Pools, kind: type[nn.Module]) -> None:
    pool(2).run(trained, kind, {})


def test_transforms_of_what_all_ranks_have_train_between_stages(pool: Pools) -> None:
    pool(2).run(trained, OfInputs, {"inner.layers.1": 1})


def test_every_microbatch_has_its_own_cache_of_parametrizations(pool: Pools) -> None:
    pool(3).run(trained, Cached, {f"inner.layers.{number}": number for number in range(3)})


def test_every_microbatch_calls_with_weights_of_its_own(pool: Pools) -> None:
    pool(3).run(trained, OtherWeights, {f"inner.layers.{number}": number for number in range(3)})


def test_weights_for_a_call_may_come_from_any_stage(pool: Pools) -> None:
    pool(3).run(trained, MadeWeights, {f"inner.layers.{number}": number for number in range(3)})
