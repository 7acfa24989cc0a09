"""One rank of a job with one of the settings: its memory, or the times of its steps, which rank 0 writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.fsdp  # code, which is not to count
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.process_memory import MIB, forget_the_most, most_anonymous, of_ranks
from benchmarks.harness.turns import turns_of
from benchmarks.memory.cases import CASES
from opensmd.tools.interpreter_memory import own_bytes

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
        self.before = own_bytes()  # what importing has left free would be taken first
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


def turns(folder: Path) -> Iterator[None]:
    """Of this job, one a step."""
    return turns_of(folder, lambda go: bool(smp.allgather(go, smp.WORLD)[0]), first=smp.rank() == 0)


def memory(job: Job, folder: Path) -> list[float]:
    """MiB beyond the libraries at the fullest moment of later steps, of the fuller rank."""
    job.train()
    forget_the_most()
    for _ in turns(folder):
        job.train()
    mine = (most_anonymous() + of_ranks() - job.before) / MIB
    return [max(smp.allgather(mine, smp.WORLD))]


def times(job: Job, folder: Path) -> list[float]:
    """Milliseconds of each step, which take turns with those of other jobs."""
    for _ in range(WARM_UP):
        job.train()
    found: list[float] = []
    for _ in turns(folder):
        start = time.perf_counter()
        job.train()
        smp.barrier()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def main() -> None:
    """``rank.py CASE WHAT FOLDER``, what being one of ``memory`` and ``times``."""
    torch.set_num_threads(1)
    job, folder = Job(sys.argv[1]), Path(sys.argv[3])
    found = (times if sys.argv[2] == "times" else memory)(job, folder)
    if smp.rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
