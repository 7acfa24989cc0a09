"""The setting ``auto``: every rank takes the strategy that the first one has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.state import state
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]

BATCH, WIDTH = 8, 16


class Block(nn.Module):
    """A layer of several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return out


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(*[Block() for _ in range(4)]), torch.ones(BATCH, 32, WIDTH)


def chosen(memory_gib: float, **given: Any) -> dict[str, Any]:
    smp.shutdown()
    settings = {"auto": {"model": f"{__name__}:build", "batch": BATCH, "memory_gib": memory_gib}, **given}
    smp.init(settings)
    smp.init(settings)  # the same again changes nothing
    cfg = state.cfg
    return {
        "partitions": cfg.partitions,
        "microbatches": cfg.microbatches,
        "pipeline": cfg.pipeline,
        "ddp": cfg.ddp,
        "checkpointed": state.checkpointed_layers,
    }


def step_losses(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], float]) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_training() -> dict[str, Any]:
    plain, batch = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def in_one_process() -> float:
        loss = plain(batch).square().mean()
        loss.backward()
        return float(loss)

    expected = step_losses(plain, optimizer, in_one_process)
    # far too little, so that what needs least is chosen
    found = chosen(1e-6, partitions=2, microbatches=2)
    model = smp.DistributedModel(build()[0])
    wrapped = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        model.backward(loss)
        return loss

    losses = step_losses(model, wrapped, lambda: train(batch).reduce_mean().item())
    assert losses == pytest.approx(expected, rel=1e-5)
    return found


def check_choices() -> list[Any]:
    roomy = chosen(1.0)
    kept = chosen(1.0, partitions=2, microbatches=2, pipeline="searched")
    refused = ""
    try:
        chosen(1.0, microbatches=5)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return [roomy, kept, refused]


def test_all_ranks_take_what_was_chosen_and_train_as_one_process(pool: Pools) -> None:
    first, second = pool(2).run(check_training)
    assert first == second
    assert first["partitions"] == 2 and first["checkpointed"] == ("0", "1", "2", "3")


def test_what_is_given_is_kept_and_what_cannot_be_is_said_on_all_ranks(pool: Pools) -> None:
    first, second = pool(2).run(check_choices)
    assert first[:2] == second[:2]
    assert (first[0]["partitions"], first[0]["ddp"]) == (1, True), "with memory for all, replicas"
    assert (first[1]["partitions"], first[1]["microbatches"], first[1]["pipeline"]) == (2, 2, "searched")
    assert first[2].startswith("ValueError: no strategy is left")
    assert second[2].startswith("PeerFailed: rank 0 could not choose a strategy: ValueError: no strategy")
