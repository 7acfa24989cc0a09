"""What a rank of a pipeline holds: its own part of the model, and few microbatches' activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools

WIDTH, LAYERS = 64, 12


def train(partitions: int, settings: dict[str, Any]) -> tuple[int, int, list[tuple[int, str, int, int]]]:
    """Two steps with Adam: bytes of parameters, bytes of gradients and optimizer state, and the record."""
    smp.shutdown()
    smp.init({"partitions": partitions, "microbatches": 6, **settings})
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters()))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        step(torch.ones(12, WIDTH))
        optimizer.step()
    record = [] if partitions == 1 else smp.state.engine.record
    parameters = list(module.parameters())
    held = sum(each.untyped_storage().nbytes() for each in parameters)
    training = [each.grad for each in parameters if each.grad is not None]
    training += [each for kept in optimizer.state.values() for each in kept.values() if each.numel() > 1]
    smp.shutdown()
    return (
        held,
        sum(each.nbytes for each in training),
        [(each.microbatch, each.kind, each.start_ns, each.end_ns) for each in record],
    )


def test_a_rank_holds_its_own_part_only(pool: Pools) -> None:
    [(whole, whole_training, _)] = pool(1).run(train, 1, {})
    parts = pool(2).run(train, 2, {"optimize": "memory"})
    assert sum(held for held, _, _ in parts) == whole
    assert sum(training for _, training, _ in parts) == whole_training
    for held, training, _ in parts:
        assert 0.3 * whole < held < 0.7 * whole
        assert training == 3 * held  # a gradient and Adam's two averages


@pytest.mark.parametrize(("active", "expected"), [(1, [1, 1]), (2, [2, 1]), (4, [3, 1])])
def test_no_more_microbatches_are_under_way_than_allowed(
    pool: Pools, active: int, expected: list[int]
) -> None:
    results = pool(2).run(train, 2, {"active_microbatches": active})
    for (_, _, record), most in zip(results, expected, strict=True):
        assert 1 <= most_under_way(record) <= most


def most_under_way(record: list[tuple[int, str, int, int]]) -> int:
    """Microbatches between the beginning of their forward and the end of their backward, at most."""
    begun = {}
    ended = {}
    for microbatch, kind, start, end in record:
        if kind == "forward":
            begun[microbatch] = min(start, begun.get(microbatch, start))
        if kind == "backward":
            ended[microbatch] = end
    return max(sum(begun[other] <= begun[each] < ended[other] for other in begun) for each in begun)
