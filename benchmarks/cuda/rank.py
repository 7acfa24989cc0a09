"""One rank of the benchmark of CUDA tensors: two groups of the same ranks serve the same calls in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.gpus import use_gpu
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, sample, timed
from benchmarks.pipeline.rank import over_smddp

__all__ = ["NCCL", "OURS", "main"]

OURS, NCCL = "smddp", "torch's NCCL"
SIZES = (4, 64 << 10, 16 << 20)  # bytes
WIDTH = 512

Calls = Mapping[str, Callable[[], object]]  # by whose group they use


class Case(NamedTuple):
    """What is measured, with how many bytes on a rank."""

    title: str
    nbytes: int
    calls: Calls


def main() -> None:
    """Measure all cases and leave the results to rank 0."""
    options = rank_parser().parse_args()
    me = join([], patience=options.patience, pinned=False)
    use_gpu(me.rank, me.size)
    me = over_smddp(me)
    groups = {OURS: dist.group.WORLD, NCCL: dist.new_group(backend="nccl")}
    results = Results("cuda", me.layout)
    for case in [*collectives(groups), step(groups)]:
        candidates = [Candidate(name, timed(until_done(call))) for name, call in case.calls.items()]
        for name, samples in sample(candidates, me.meeting, me.calm, plan(options)).items():
            results.rows.append(row(case.title, case.nbytes, name, samples))
    leave(me, results)


def until_done(call: Callable[[], object]) -> Callable[[], None]:
    """``call``, and then the wait for what it has left to the GPU."""

    def done() -> None:
        call()
        torch.cuda.synchronize()

    return done


def collectives(groups: Mapping[str, dist.ProcessGroup | None]) -> Iterator[Case]:
    """Sums and gathering of all sizes."""
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4, device="cuda")
        outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        sum_up, gather = partial(dist.all_reduce, tensor), partial(dist.all_gather, outputs, tensor)
        for title, call in (("all_reduce", sum_up), ("all_gather", gather)):
            yield Case(title, nbytes, {name: partial(call, group=group) for name, group in groups.items()})


def step(groups: Mapping[str, dist.ProcessGroup | None]) -> Case:
    """A training step of an MLP under DDP."""
    inputs = torch.randn(64, WIDTH, device="cuda")
    calls: dict[str, Callable[[], object]] = {}
    nbytes = 0
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*layers).cuda(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())

        def train(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()

        calls[name] = train
    return Case("DDP step, an MLP of 4 layers", nbytes, calls)


if __name__ == "__main__":
    main()
