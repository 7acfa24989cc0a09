"""One rank of the benchmark of steps between hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, sample, timed

__all__ = ["ALONE", "OF_FORWARD"]

ALONE = "computing alone"
OF_FORWARD = 1 / 3  # of the time of a layer; a backward takes twice as long


class Waiting(torch.autograd.Function):
    """A layer that computes elsewhere: it waits, and has a gradient for each of its numbers."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """Wait for a third of the time."""
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds * OF_FORWARD)
        return value + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Wait for the rest."""
        time.sleep(ctx.seconds * (1 - OF_FORWARD))
        return gradients[0], gradients[0].expand(ctx.shape), None


class Layer(nn.Module):
    """One of them."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))
        self.seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add the first of the weights."""
        return Waiting.apply(value, self.weight, self.seconds)


def main() -> None:
    """Measure every step and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--bucket", type=float, required=True)
    parser.add_argument("--computing", type=float, nargs="+", required=True)
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience, pinned=False)
    results = Results("step between hosts", me.layout)
    for seconds in options.computing:
        count, each = options.bytes // 4 // options.layers, seconds / options.layers
        candidates = [_alone(count, each, options.layers)]
        candidates += [_together(me, name, count, each, options) for name in me.groups]
        found = sample(candidates, me.meeting, me.calm, plan(options))
        case = f"{seconds * 1e3:.0f} ms of computing"
        results.rows += [row(case, options.bytes, name, samples) for name, samples in found.items()]
        if me.rank == 0:
            print(
                case, {name: f"{sorted(samples)[len(samples) // 2]:.5g}" for name, samples in found.items()}
            )
    leave(me, results)


def _layers(count: int, seconds: float, layers: int) -> nn.Sequential:
    return nn.Sequential(*[Layer(count, seconds) for _ in range(layers)])


def _alone(count: int, seconds: float, layers: int) -> Candidate:
    return Candidate(ALONE, timed(_step(_layers(count, seconds, layers))))


def _together(me: Rank, name: str, count: int, seconds: float, options: Any) -> Candidate:
    model = DistributedDataParallel(
        _layers(count, seconds, options.layers),
        process_group=me.groups[name],
        bucket_cap_mb=options.bucket,
        gradient_as_bucket_view=True,
    )
    step = _step(model)
    for _ in range(3):  # until buckets have settled
        step()

    def check() -> None:
        step()
        mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
        if not all(bool((weight.grad == mean).all()) for weight in model.parameters()):
            raise RuntimeError(f"{name}: gradients are not the ranks' average")

    return Candidate(name, timed(step), check)


def _step(model: nn.Module) -> Callable[[], None]:
    """Every rank has its own gradients: its number and one."""
    value = torch.zeros(1)

    def step() -> None:
        model.zero_grad()
        (model(value).sum() * (dist.get_rank() + 1)).backward()

    return step


if __name__ == "__main__":
    main()
