"""One rank of a split GPT-2: what its process keeps beside what its tensors need, and how long steps take."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.process_memory import MIB, forget_the_most, most_anonymous, of_ranks
from benchmarks.harness.turns import turns_of
from benchmarks.resident.models import MICROBATCHES, RANKS, VOCABULARY, WORDS, gpt2
from opensmd.native import core
from opensmd.tools.interpreter_memory import own_bytes

WARM_UP = 2  # steps


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def of_c_library() -> int:
    """Bytes that its allocator has given out."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Mallinfo
    info = read()
    return int(info.uordblks + info.hblkhd)


class Job:
    """A script that trains a GPT-2 with one partition a rank."""

    def __init__(self, case: str) -> None:
        smp.init({"partitions": RANKS[case], "microbatches": MICROBATCHES})
        self.others = own_bytes() - of_c_library()
        torch.manual_seed(0)
        self.model = model = smp.DistributedModel(gpt2(case))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

        @smp.step
        def step(ids: Tensor) -> Tensor:
            loss: Tensor = model(ids, labels=ids).loss
            model.backward(loss)
            return loss

        self.step = step
        self.ids = torch.randint(VOCABULARY, (MICROBATCHES, WORDS))

    def train(self) -> float:
        """A whole step; milliseconds until all ranks have made it."""
        smp.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.step(self.ids)
        self.optimizer.step()
        smp.barrier()
        return (time.perf_counter() - start) * 1e3

    def live(self) -> int:
        """Bytes of tensors at their fullest moment of two steps, and all else; 0 if nobody counts."""
        tensors = core.tensor_memory()
        return tensors.most + self.others + of_c_library() + of_ranks() if tensors.most else 0


def main() -> None:
    """``rank.py CASE FOLDER``: steps in turn with those of other jobs."""
    torch.set_num_threads(1)
    job, folder = Job(sys.argv[1]), Path(sys.argv[2])
    for _ in range(WARM_UP):
        job.train()
    forget_the_most()
    turns = turns_of(folder, lambda go: bool(smp.allgather(go, smp.WORLD)[0]), first=smp.rank() == 0)
    times = [job.train() for _ in turns]
    mine = ((most_anonymous() + of_ranks()) / MIB, job.live() / MIB)
    every = smp.allgather(mine, smp.WORLD)
    if smp.rank() == 0:
        peaks, live = zip(*every, strict=True)
        (folder / "found.json").write_text(json.dumps({"times": times, "peaks": peaks, "live": live}))


if __name__ == "__main__":
    main()
