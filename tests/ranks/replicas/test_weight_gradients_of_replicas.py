"""Weight gradients that replicas have left for last: their buckets leave while others are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smdistributed.modelparallel.torch as smp
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

WIDTH, LAYERS = 6, 4  # of a stage


def buckets_that_leave(pipeline: str) -> tuple[int, list[tuple[str, int]]]:
    """This rank's stage, and of every bucket of a step what the rank did, and how many weights were done."""
    restart(
        partitions=2,
        microbatches=4,
        pipeline=pipeline,
        ddp=True,
        auto_partition=False,
        default_partition=0,
    )
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * LAYERS)])
    for layer in module[LAYERS:]:
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(module, bucket_cap_mb=1e-6)
    own = module[:LAYERS] if smp.pp_rank() == 0 else module[LAYERS:]
    seen: list[tuple[str, list[Tensor]]] = []

    # torch compares annotations, which are texts in this file
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        assert model._engine is not None
        kind = model._engine._record.kind
        seen.append((kind, [layer.weight.grad.clone() for layer in own]))
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook(smp.get_dp_process_group(), hook)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    for _ in range(3):  # torch makes its buckets anew after the first
        seen.clear()
        for parameter in module.parameters():
            parameter.grad = None
        step(torch.ones(8, WIDTH))
    done = seen[-1][1]
    return smp.pp_rank(), [(kind, sum(map(torch.equal, gradients, done))) for kind, gradients in seen]


@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble", "searched"])
def test_the_buckets_of_replicas_leave_while_weight_gradients_are_computed(
    pool: Callable[[int], RankPool], pipeline: str
) -> None:
    found: list[Any] = pool(4).run(buckets_that_leave, pipeline, backend="smddp")
    for stage, buckets in found:
        expected = "weights" if stage else "backward"  # the first stage sends no gradients: nothing waits
        assert buckets == [(expected, done) for done in range(1, LAYERS + 1)], (stage, buckets)
