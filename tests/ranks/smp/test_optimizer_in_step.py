"""Optimizers that a step function of one microbatch calls, on a split model and on plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3


class Adversaries(nn.Module):
    """A generator with more parameters than its discriminator; neither has as many as another rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 8)
        )
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1, bias=False))


def train(pair: Adversaries, backward: Any, step: Any, wrap: Any, clip: Any) -> list[Any]:
    """What public GAN scripts do in one function: both networks take turns, each with its optimizer."""
    of_judge = wrap(torch.optim.Adam(pair.judge.parameters(), lr=0.01, betas=(0.5, 0.999)))
    of_generator = wrap(torch.optim.RMSprop(pair.generator.parameters(), lr=0.01))

    def verdict(samples: Tensor, wanted: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(pair.judge(samples), torch.full((len(samples), 1), wanted))

    @step
    def both(real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_judge.zero_grad()
        fake = pair.generator(noise)
        of_judge_loss = verdict(real, 1.0) + verdict(fake.detach(), 0.0)
        backward(of_judge_loss)
        clip(of_judge, pair.judge)
        of_judge.step()
        of_generator.zero_grad()
        of_generator_loss = verdict(fake, 1.0)
        backward(of_generator_loss)
        of_generator.step()
        # Weights in the step function itself: a copy that another rank had before is an old one now.
        return of_judge_loss, of_generator_loss, F.linear(fake, pair.judge[0].weight).mean()

    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        losses += both(torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator))
    return losses


def takes_turns(places: str) -> None:
    plain = Adversaries()
    wanted = train(
        plain,
        lambda loss: loss.backward(),
        lambda function: function,
        lambda optimizer: optimizer,
        lambda _, module: nn.utils.clip_grad_norm_(module.parameters(), 0.05),
    )
    smp.shutdown()
    by_hand = {"auto_partition": False, "default_partition": 1} if places == "by hand" else {}
    smp.init({"partitions": 2, "microbatches": 1, **by_hand})
    pair = Adversaries()
    if by_hand:
        smp.set_partition(pair.judge, 0)
    model = smp.DistributedModel(pair)
    found = train(
        pair, model.backward, smp.step, smp.DistributedOptimizer, lambda each, _: each.clip_master_grads(0.05)
    )
    torch.testing.assert_close(
        torch.stack([output.reduce_mean() for output in found]),
        torch.stack([loss.detach() for loss in wanted]),
        rtol=1e-4,
        atol=1e-5,
    )
    counts = smp.allgather(len(list(model.local_parameters())), smp.CommGroup.PP_GROUP)
    assert 0 < counts[0] != counts[1] > 0, "this is about ranks with other numbers of parameters"
    weights = dict(model.state_dict())
    smp.shutdown()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def losses_in_bf16(inside: bool) -> list[float]:
    """With the optimizer called in the step function, or after it."""
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 1, "bf16": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))

    def finish() -> None:
        optimizer.clip_master_grads(0.5)
        optimizer.step()

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        model.backward(loss)
        if inside:
            finish()
        return loss

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(torch.ones(2, 4)).reduce_mean().item())
        if not inside:
            finish()
    smp.shutdown()
    return losses


def trains_masters() -> None:
    after = losses_in_bf16(inside=False)
    assert losses_in_bf16(inside=True) == after and len(set(after)) == STEPS


@pytest.mark.parametrize("places", ["automatic", "by hand"])
def test_two_networks_take_turns_in_one_step_function(pool: Pools, places: str) -> None:
    pool(2).run(takes_turns, places)


def test_masters_are_trained_inside_a_step_function_as_after_it(pool: Pools) -> None:
    pool(2).run(trains_masters)
