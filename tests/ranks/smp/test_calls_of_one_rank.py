"""What ranks do together is called by all of them; if one calls it alone, all learn which call that was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.ranks import run_once

SPLIT = {"partitions": 2, "microbatches": 2}
REPLICAS = {**SPLIT, "ddp": True}
SLICED = {"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2}
Call = Callable[[Any, Any, Path], object]
EVALUATION = "the step 'evaluate.<locals>.forward' without gradients"


@torch.no_grad()
def evaluate(model: Any) -> None:
    @smp.step
    def forward(x: Tensor) -> object:
        return model(x)

    forward(torch.ones(4, 4))


CALLS: dict[str, Call] = {
    "model.state_dict()": lambda model, optimizer, path: model.state_dict(),
    "model.load_state_dict()": lambda model, optimizer, path: model.load_state_dict({}, strict=False),
    "optimizer.state_dict()": lambda model, optimizer, path: optimizer.state_dict(),
    "optimizer.step()": lambda model, optimizer, path: optimizer.step(),
    "optimizer.clip_master_grads()": lambda model, optimizer, path: optimizer.clip_master_grads(1.0),
    "smp.barrier": lambda model, optimizer, path: smp.barrier(),
    EVALUATION: lambda model, optimizer, path: evaluate(model),
    "smp.save(partial=True)": lambda model, optimizer, path: smp.save({}, str(path / "saved")),
    "smp.save_checkpoint": lambda model, optimizer, path: smp.save_checkpoint(str(path), "tag", model=model),
}


def call_on_one_rank(settings: dict[str, Any], call: str, path: Path) -> None:
    smp.init(settings)
    with smp.tensor_parallelism():
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = smp.DistributedModel(layers)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x).mean())

    train(torch.ones(4, 4))
    if smp.rank() == 0:
        CALLS[call](model, optimizer, path)
    train(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        (SPLIT, "model.load_state_dict()"),
        (SPLIT, "smp.save(partial=True)"),
        (SPLIT, "optimizer.clip_master_grads()"),
        (REPLICAS, "smp.barrier"),
        (REPLICAS, "model.state_dict()"),
        (SLICED, "optimizer.state_dict()"),
        (SLICED, "optimizer.step()"),
        (SLICED, EVALUATION),
        (SLICED, "smp.save_checkpoint"),  # once, the number of another call was taken for a size
    ],
)
def test_all_ranks_learn_what_one_of_them_has_called_alone(
    tmp_path: Path, settings: dict[str, Any], call: str
) -> None:
    for outcome in run_once(4 if settings is REPLICAS else 2, call_on_one_rank, settings, call, tmp_path):
        assert f"rank 0 called {call}, rank 1 called " in str(outcome.value), outcome
        assert "`if smp.rank() == 0:`" in str(outcome.value)
