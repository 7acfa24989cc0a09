"""What a rank of a pipeline holds: its own part of the model, and few microbatches' activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools
from tests.support.ranks import run_once

WIDTH, LAYERS = 1536, 12  # 108 MiB of parameters


def model(width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def peak_kib() -> int:
    """The most memory that this process has had since the mark was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kib()


def measure(partitions: int, settings: dict[str, Any]) -> tuple[int, int, list[tuple[int, str, int, int]]]:
    """A small model first, because what it imports counts as memory too."""
    train(partitions, settings, 8)
    return train(partitions, settings, WIDTH)


def train(
    partitions: int, settings: dict[str, Any], width: int
) -> tuple[int, int, list[tuple[int, str, int, int]]]:
    """Two steps with Adam: growth of the peak in KiB, bytes of all parameters' memory, and the record."""
    smp.shutdown()
    smp.init({"partitions": partitions, "microbatches": 6, **settings})
    start = reset_peak()
    module = model(width)
    wrapped = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters()))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = wrapped(x).square().mean()
        wrapped.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        step(torch.ones(12, width))
        optimizer.step()
    record = [] if partitions == 1 else smp.state.engine.record
    held = sum(each.untyped_storage().nbytes() for each in module.parameters())
    grown = peak_kib() - start
    smp.shutdown()
    return grown, held, [(each.microbatch, each.kind, each.start_ns, each.end_ns) for each in record]


def fresh(partitions: int, settings: dict[str, Any]) -> list[Any]:
    """Measured in new processes whose threads share one heap, so that freed memory is seen to be free."""
    outcomes = run_once(partitions, measure, partitions, settings, env={"MALLOC_ARENA_MAX": "1"})
    assert [outcome.kind for outcome in outcomes] == ["value"] * partitions, outcomes
    return [outcome.value for outcome in outcomes]


def test_a_rank_holds_its_own_part_only() -> None:
    [(single, whole, _)] = fresh(1, {})
    for grown, held, _ in fresh(2, {"optimize": "memory"}):
        assert 0.3 * whole < held < 0.7 * whole
        # the transient memory of Adam's step comes on top
        assert grown < (held / whole + 0.25) * single, (grown, single, held / whole)


@pytest.mark.parametrize(("active", "expected"), [(1, [1, 1]), (2, [2, 1]), (4, [3, 1])])
def test_no_more_microbatches_are_under_way_than_allowed(
    pool: Pools, active: int, expected: list[int]
) -> None:
    results = pool(2).run(measure, 2, {"active_microbatches": active})
    assert [most_under_way(record) for _, _, record in results] == expected


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
