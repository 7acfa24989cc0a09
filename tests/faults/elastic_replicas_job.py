"""The script of a job whose replicas are killed again and again: trains until a file tells that it is enough.

Every replica writes a line a step, from which anybody can do the same training in plain PyTorch: the share
of the data that it had, and how many replicas have ended the step. At the end every rank writes a hash of
what it has trained.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH = 16
PAUSE = 0.1  # seconds between two steps, which leaves the cores to a replica that starts
MOST_STEPS = 10**6
MISSED = "missed"  # beside the file that tells of the end: the others have made a step without who was killed


def module() -> nn.Module:
    """The model, alike everywhere."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2)]
    return nn.Sequential(*layers)


def data_of(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The share of a step's batch."""
    numbers = torch.Generator().manual_seed(step)
    rows, targets = torch.randn(BATCH, 6, generator=numbers), torch.randn(BATCH, 2, generator=numbers)
    return rows[rank::size], targets[rank::size]


def loss_of(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean square."""
    return nn.functional.mse_loss(found, wanted)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """What trains the model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def hash_of(parameters: Iterable[nn.Parameter]) -> str:
    """Equal for equal bits."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def wait_until_missed(told: Path) -> None:
    """On busy cores, a replica may be back before the others have made a step without it, as is counted."""
    while not told.exists():
        time.sleep(PAUSE)


def main(enough: Path) -> None:
    """Train as one rank."""
    import smdistributed.modelparallel.torch as smp

    print(f"process {os.getpid()}", flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        wait_until_missed(enough.with_name(MISSED))
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "elastic": {"timeout": 60}})
    model = smp.DistributedModel(module(), bucket_cap_mb=0.01)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))

    @smp.step
    def train_step(rows: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(rows), targets)
        model.backward(loss)
        return loss

    for step in smp.elastic_steps(range(MOST_STEPS)):
        rank, size = smp.dp_rank(), smp.dp_size()
        optimizer.zero_grad()
        loss = train_step(*data_of(step, rank, size)).reduce_mean().item()
        ended = smp.dp_size()
        optimizer.step()
        if smp.mp_rank() == 0:
            print(
                f"step {step} share {rank}/{size} ended {ended} loss {loss:.7f} at {time.time()}", flush=True
            )
        time.sleep(PAUSE)
        if any(smp.allgather(enough.exists(), smp.WORLD)):
            break
    print(f"stage {smp.pp_rank()} has {hash_of(model.local_parameters())}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
