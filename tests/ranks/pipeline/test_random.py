"""Random numbers in pipelines: the same seed, the same training; replicated values are equal on all ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from tests.ranks.models.case import CLASSES, WIDTH, classify
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart

WAYS = list(itertools.product((1, 4), ("simple", "interleaved")))


class Noisy(nn.Module):
    """Dropout in modules, on inputs, on placed values; noise that every rank draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        x = F.dropout(x, 0.5)
        noise = torch.randn(len(x), WIDTH)
        h = F.dropout(self.second(torch.tanh(self.first(x))), 0.5)
        out = self.head(h + noise + torch.rand_like(h))
        return out, float(noise.sum() + x.sum())


class Masked(nn.Module):
    """Linear in each layer, with dropout under activation checkpointing: gradients betray other masks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.5))
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)
        h = checkpoint(lambda h: F.dropout(h, 0.5) * 2.0, h, use_reentrant=self.reentrant)
        out: Tensor = self.head(h)
        return out


class Scaled(nn.Linear):
    """Draws inside, on one rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() + numpy.random.rand() if self.training else 1.0)


class Skipping(nn.Module):
    """Skips layers at random, by numbers of Python and NumPy; which ones depends on what was drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(WIDTH, WIDTH), Scaled(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        drawn = 0.0
        for layer in (self.first, self.second, self.first, self.second):
            if self.training:
                drawn += random.random() + numpy.random.rand()
            if drawn % 1.0 < 0.6:
                x = layer(x)
        return self.head(x), drawn


def start(module: nn.Module, microbatches: int, schedule: str) -> Any:
    smp.shutdown()
    smp.init(
        {
            "partitions": 2,
            "microbatches": microbatches,
            "pipeline": schedule,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    smp.set_partition(module.get_submodule("second"), 1)
    return smp.DistributedModel(module)


def train_noisy(
    kind: type[nn.Module], microbatches: int, schedule: str
) -> tuple[list[float], list[list[float]]]:
    """Losses of four steps, and what this rank saw of replicated noise in each microbatch.

    Before the last step torch is seeded as before the first.
    """
    torch.manual_seed(0)
    model = start(kind(), microbatches, schedule)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        logits, seen = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, seen

    model.eval()
    smp.step(lambda x: model(x))(classify(0, 8)[0])
    model.train()
    torch.manual_seed(3)
    own = random.Random(smp.rank()), numpy.random.RandomState(smp.rank())
    random.seed(smp.rank())
    numpy.random.seed(smp.rank())
    losses, noises = [], []
    for step in (0, 1, 2, 0):
        if len(losses) == 3:
            torch.manual_seed(3)
        loss, seen = train_step(*classify(step, 8))
        losses.append(loss.reduce_mean().item())
        noises.append(seen)
        assert (random.random(), numpy.random.rand()) == (own[0].random(), own[1].rand())
    smp.shutdown()
    return losses, noises


def twice_noisy(kind: type[nn.Module]) -> list[Any]:
    return [[train_noisy(kind, *way) for _ in range(2)] for way in WAYS]


def checkpointed_masks() -> None:
    """The loss is linear in every weight, so weight times gradient is the loss, if masks are the same."""
    for reentrant, (microbatches, schedule) in itertools.product((False, True), WAYS):
        torch.manual_seed(0)
        model = start(Masked(reentrant), microbatches, schedule)

        @smp.step
        def train_step(x: Tensor, model: Any = model) -> Tensor:
            loss: Tensor = model(x).mean()
            model.backward(loss)
            return loss

        for step in range(2):
            model.zero_grad()
            loss = train_step(classify(step, 8)[0]).reduce_mean()
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(
                    (parameter * parameter.grad).sum(), loss, rtol=1e-4, atol=1e-6, msg=name
                )
        smp.shutdown()


@pytest.mark.parametrize("kind", [Noisy, Skipping])
def test_the_same_seed_gives_the_same_training(pool: Pools, kind: type[nn.Module]) -> None:
    ranks = pool(2).run(twice_noisy, kind)
    for way, first, second in zip(WAYS, *ranks, strict=True):
        assert first[0] == first[1], way
        assert first == second, f"{way}: ranks drew different numbers"
        losses, noises = first[0]
        assert (losses[3], noises[3]) == (losses[0], noises[0]) and len(set(losses)) == 3
        assert len({one for seen in noises for one in seen}) == 3 * way[0]


def test_checkpointing_recomputes_with_the_same_masks(pool: Pools) -> None:
    pool(2).run(checkpointed_masks)


class OwnGenerator(nn.Module):
    """Draws between modules from a generator of its own, before and after it has asked for a value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(1)

    def noise(self) -> Tensor:
        return torch.randn(WIDTH, generator=self.generator)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x + self.noise())))
        out: Tensor = h * 2 if h.sum().item() > 1e9 else h
        return out + self.noise()


def draw_in_order(pipeline: str) -> None:
    restart(partitions=2, microbatches=4, pipeline=pipeline, auto_partition=False, default_partition=0)
    module, plain = OwnGenerator(), OwnGenerator()
    smp.set_partition(module.second, 1)
    batches = ((classify(step, 8)[0],) for step in range(3))
    train_beside(smp.DistributedModel(module), plain, batches, microbatches=4)
    smp.shutdown()


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_a_generator_of_the_model_gives_its_numbers_in_the_order_of_the_microbatches(
    pool: Pools, pipeline: str
) -> None:
    pool(2).run(draw_in_order, pipeline)
