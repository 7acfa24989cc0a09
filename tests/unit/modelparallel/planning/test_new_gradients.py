"""How many gradients there are beside those that a step leaves, counted in a model whose sizes are plain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.new_gradients import new_gradient_bytes
from opensmd.modelparallel.planning.partition import manual_partition
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.trace import ModelTrace

WORDS, WIDTH = 50, 8
EMBEDDING, LAYER = 4 * WORDS * WIDTH, 4 * WIDTH * WIDTH


class Language(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embedding(ids)))
        return found


def planned(*, tied: bool) -> tuple[Plan, ModelTrace]:
    model = Language(tied=tied)
    trace = capture(model, lambda: model(torch.arange(6)).sum())
    return manual_partition(trace, 2, fixed={"embedding": 1, "head": 1, "layers": 0}, default=1), trace


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_a_gradient_is_made_beside_the_one_it_is_added_to(microbatches: int) -> None:
    plan, trace = planned(tied=False)
    sizes = [
        new_gradient_bytes(plan, trace, stage, in_flight=2, microbatches=microbatches) for stage in (0, 1)
    ]
    assert sizes == [LAYER, EMBEDDING]


def test_a_step_of_one_microbatch_adds_to_nothing() -> None:
    plan, trace = planned(tied=False)
    assert [new_gradient_bytes(plan, trace, stage, in_flight=1, microbatches=1) for stage in (0, 1)] == [0, 0]


@pytest.mark.parametrize(("microbatches", "most"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_every_microbatch_in_flight_keeps_one_of_a_weight_that_is_used_again(
    microbatches: int, most: int
) -> None:
    plan, trace = planned(tied=True)
    flying = min(2, microbatches)
    assert new_gradient_bytes(plan, trace, 1, in_flight=flying, microbatches=microbatches) == most * EMBEDDING


def test_frozen_weights_have_none() -> None:
    model = Language(tied=True).requires_grad_(False)
    trace = capture(model, lambda: model(torch.arange(6)).sum())
    plan = manual_partition(trace, 1, fixed={}, default=0)
    assert new_gradient_bytes(plan, trace, 0, in_flight=2, microbatches=8) == 0
