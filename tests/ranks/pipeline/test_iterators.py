"""Iterators as arguments of a module: what they compute comes from several stages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart
from tests.support.ranks import describe, run_once

WIDTH, MICROBATCHES = 4, 2


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Iterator[Tensor], *, more: Iterator[Tensor]) -> Tensor:
        return torch.stack([next(features), *map(self.linear, features), *more]).sum(0)


class Pyramid(nn.Module):
    """Features of two stages for a head on the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Head()

    def forward(self, x: Tensor) -> Tensor:
        low = torch.tanh(self.first(x))
        high = torch.tanh(self.second(low))
        out: Tensor = self.head((2 * each for each in (x, low, high)), more=map(torch.exp, (low,)))
        return out


class Shared(Pyramid):
    def forward(self, x: Tensor) -> Tensor:
        features = (each for each in (x, self.first(x)))
        out: Tensor = self.head(features, more=features)
        return out


def split(kind: type[Pyramid]) -> Pyramid:
    restart(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    module = kind()
    for part in (module.second, module.head):
        smp.set_partition(part, 1)
    return module


def trained() -> None:
    batches = [(torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1)),)] * 2
    train_beside(smp.DistributedModel(split(Pyramid)), Pyramid(), batches, microbatches=MICROBATCHES)
    smp.shutdown()


def test_a_head_gets_iterators_over_features_of_two_stages(pool: Pools) -> None:
    pool(2).run(trained)


def two_arguments() -> None:
    model = smp.DistributedModel(split(Shared))

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).sum())

    step(torch.ones(4, WIDTH))


def test_one_generator_for_two_arguments_is_refused() -> None:
    outcomes = run_once(2, two_arguments)
    assert [outcome.kind for outcome in outcomes] == ["error", "error"], describe(two_arguments, outcomes)
    says = "module 'head' was given a generator that a module has been given before"
    assert says in describe(two_arguments, outcomes)
