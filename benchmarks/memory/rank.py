"""One rank of a job with one of the settings: its memory, or the times of its steps, which rank 0 writes."""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # code, which is not to count
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.process_memory import MIB, anonymous, forget_the_most, most_anonymous, of_ranks
from benchmarks.memory.cases import CASES

WIDTH, BLOCKS, ROWS, DEPTH = 512, 12, 1024, 4  # rows of both ranks together
WARM_UP = 2  # steps


class Block(nn.Module):
    """Residual; keeps about as much of activations as a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        for _ in range(DEPTH):
            hidden = torch.tanh(hidden)
        result: Tensor = x + self.down(hidden)
        return result


class Job:
    """A script with the settings of a case."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        smp.init({"ddp": True, **case.settings})
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what importing has left free would be taken first
        self.before = anonymous()
        torch.manual_seed(0)
        with smp.model_creation(tensor_parallelism=case.tensor_parallelism):
            net = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.model = model = smp.DistributedModel(net)
        for block in model.get_module() if case.checkpoints else ():
            smp.set_activation_checkpointing(block)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss = (model(x) - 1).square().mean()
            model.backward(loss)
            return loss

        whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.rows = whole.chunk(smp.dp_size())[smp.dp_rank()].clone()
        self.step = step

    def train(self) -> None:
        """A whole step."""
        self.optimizer.zero_grad()
        self.step(self.rows)
        self.optimizer.step()


def memory(job: Job) -> list[float]:
    """MiB beyond the libraries at the fullest moment of later steps, of the fuller rank."""
    job.train()
    forget_the_most()
    for _ in range(WARM_UP):
        job.train()
    mine = (most_anonymous() + of_ranks() - job.before) / MIB
    return [max(smp.allgather(mine, smp.WORLD))]


def times(job: Job, seconds: float) -> list[float]:
    """Milliseconds of a step, the median."""
    for _ in range(WARM_UP):
        job.train()
    found: list[float] = []
    end = time.perf_counter() + seconds
    going = True
    while going:
        smp.barrier()
        start = time.perf_counter()
        job.train()
        smp.barrier()
        found.append((time.perf_counter() - start) * 1e3)
        more = torch.tensor(time.perf_counter() < end)
        dist.broadcast(more, 0)
        going = bool(more)
    return [statistics.median(found)]


def main() -> None:
    """``rank.py CASE SECONDS FILE``: memory with 0 seconds."""
    torch.set_num_threads(1)
    seconds = float(sys.argv[2])
    job = Job(sys.argv[1])
    found = times(job, seconds) if seconds else memory(job)
    if smp.rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
