"""One rank of a job that trains and saves in one way after the other, and writes what it found."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

WIDTH, ROWS, BLOCKS, STEPS = 512, 512, 12, 3  # blocks of a rank; steps of a turn
RANKS: dict[str, int] = {
    "one process, a core free": 1,
    "two partitions": 2,
    "two replicas": 2,
    "two sharded replicas": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "two partitions": {"partitions": 2, "microbatches": 4},
    "two sharded replicas": {"sharded_data_parallel_degree": 2},
}
NOTHING, BLOCKING, AT_ONCE, BESIDE = "no save", "a save that blocks", "copied at once", "copied beside a step"
WAYS = (NOTHING, BLOCKING, AT_ONCE, BESIDE)
MEMORY = "/dev/shm"  # so that the disk does not count
Turn = tuple[float, float, float]  # ms until the save returned, until all steps were done, and the file, too


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

    def train(self) -> None:
        """A step, which waits for copies where it must."""
        self.optimizer.zero_grad()
        self.step(self.x)
        self.optimizer.step()

    def turn(self, way: str) -> Turn:
        """Some steps, after a save in this way."""
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
        called = time.perf_counter()
        for _ in range(STEPS):
            self.train()
        smp.barrier()
        trained = time.perf_counter()
        if save is not None:
            save.wait()
        smp.barrier()
        ended = time.perf_counter()
        return tuple(1e3 * (moment - start) for moment in (called, trained, ended))  # type: ignore[return-value]


def measure(job: Job, seconds: float, ways: Sequence[str] = WAYS) -> dict[str, list[Turn]]:
    """The ways in turn; the longer of the ranks."""
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    order, draw, end = list(ways), random.Random(0), time.perf_counter() + seconds
    while smp.allgather(time.perf_counter() < end, smp.WORLD)[0]:
        draw.shuffle(order)
        for way in order:
            ranks = smp.allgather(job.turn(way), smp.WORLD)
            found[way].append(tuple(map(max, zip(*ranks, strict=True))))
    return {way: turns[1:] or turns for way, turns in found.items()}  # the first save gets its memory


def main() -> None:
    """``rank.py LAYOUT SECONDS FOLDER WAYS...``, the folder of a save and of ``found.json``."""
    torch.set_num_threads(1)
    found = measure(Job(sys.argv[1], sys.argv[3]), float(sys.argv[2]), sys.argv[4:])
    if smp.rank() == 0:
        (Path(sys.argv[3]) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
