"""One rank of a job that trains and saves in one way after the other, and writes what it found."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

WIDTH, ROWS, BLOCKS, STEPS = 512, 512, 12, 4  # blocks of a rank; steps of a turn
RANKS: dict[str, int] = {"one process, a core free": 1, "two partitions": 2, "two replicas": 2}
SETTINGS: dict[str, dict[str, Any]] = {"two partitions": {"partitions": 2, "microbatches": 4}}
NOTHING, BLOCKING, AT_ONCE, BESIDE = "no save", "a save that blocks", "copied at once", "copied beside a step"
WAYS = (NOTHING, BLOCKING, AT_ONCE, BESIDE)
MEMORY = "/dev/shm"  # so that the disk does not count


class Block(nn.Module):
    """Residual, of 1.05 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Job:
    """A script that saves 151 MB a rank: parameters and Adam's state."""

    def __init__(self, layout: str, folder: str, *, rows: int = ROWS, blocks: int = BLOCKS) -> None:
        smp.init({"ddp": True, **SETTINGS.get(layout, {})})
        torch.manual_seed(0)
        net = nn.Sequential(*[Block() for _ in range(blocks * smp.pp_size())])
        self.model = model = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.folder = folder
        self.x = torch.randn(rows, WIDTH)

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss = (model(x) - 1).square().mean()
            model.backward(loss)
            return loss

        self.step = step
        self.train()

    def train(self, save: Any = None) -> float:
        """A step; returns the seconds that it waited for the copies of ``save``."""
        self.optimizer.zero_grad()
        self.step(self.x)
        start = time.perf_counter()
        if save is not None:
            save.wait_until_copied()  # as optimizer.step does
        waited = time.perf_counter() - start
        self.optimizer.step()
        return waited

    def turn(self, way: str) -> tuple[float, float]:
        """Milliseconds of some steps with a save in this way, and those that training stood still for it."""
        smp.barrier()
        start, save = time.perf_counter(), None
        if way != NOTHING:
            save = smp.save_checkpoint(
                self.folder,
                "now",
                model=self.model,
                optimizer=self.optimizer,
                blocking=way == BLOCKING,
            )
            if way == AT_ONCE:
                save.wait_until_copied()
        stood = time.perf_counter() - start
        stood += self.train(save if way == BESIDE else None)
        for _ in range(STEPS - 1):
            self.train()
        if save is not None:
            save.wait()
        smp.barrier()
        return (time.perf_counter() - start) * 1e3, stood * 1e3


def measure(job: Job, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """What each way took, all of them in turn; the longer of the ranks."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    order, draw, end = list(WAYS), random.Random(0), time.perf_counter() + seconds
    while smp.allgather(time.perf_counter() < end, smp.WORLD)[0]:
        draw.shuffle(order)
        for way in order:
            ranks = smp.allgather(job.turn(way), smp.WORLD)
            found[way].append((max(total for total, _ in ranks), max(stood for _, stood in ranks)))
    return {way: turns[1:] or turns for way, turns in found.items()}  # the first save gets its memory


def main() -> None:
    """``rank.py LAYOUT SECONDS FOLDER``, of a save and of ``found.json``."""
    torch.set_num_threads(1)
    found = measure(Job(sys.argv[1], sys.argv[3]), float(sys.argv[2]))
    if smp.rank() == 0:
        (Path(sys.argv[3]) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
