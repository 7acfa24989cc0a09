"""smddp against gloo on the same work: copies of one model take the same steps in turn, one a backend.

    smdrun -n 2 examples/data_parallel/side_by_side.py

A third copy trains alone on each rank: what it needs is the time without any communication. The losses of the
two backends must agree. Prints a table and draws ``--plot``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import CharGPT, batch, read_text
from digits import make_model
from images import load_images
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  # registers the backend "smddp"

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
WARM_UP = 3


@dataclass
class Runner:
    """One copy of a model, and what its steps took and gave."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Train on one batch, beginning together with the other ranks."""
        dist.barrier()
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss.detach()))

    def milliseconds(self) -> float:
        """Median step of the slowest rank."""
        slowest = torch.tensor(self.seconds[WARM_UP:])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist()) * 1000


def runner(name: str, make: Callable[[], nn.Module], backend: str | None) -> Runner:
    """A fresh copy from the same seed, wrapped for a backend, or left alone."""
    torch.manual_seed(0)
    model: nn.Module = make()
    if backend is not None:
        model = DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
    return Runner(name, model, torch.optim.AdamW(model.parameters(), lr=2e-3))


def digits_work() -> tuple[Callable[[], nn.Module], Batches]:
    """The convolutional net and this rank's batches."""
    train, _, classes = load_images(None)
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in train.tensors)
    pieces = list(zip(images.split(32), labels.split(32), strict=True))[:-1]
    return lambda: make_model(1, classes), cycle(pieces)


def char_gpt_work() -> tuple[Callable[[], nn.Module], Batches]:
    """The GPT and this rank's batches."""
    text = read_text(None, "*.py", 1_000_000)
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda: CharGPT(len(letters)), iter(lambda: batch(data, 8, generator), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", type=Path, default=Path("out/side_by_side.png"))
    args = parser.parse_args()
    dist.init_process_group("smddp")
    table = Table(title=f"one training step, {dist.get_world_size()} processes, median ms")
    for column in ("model", "gloo", "smddp", "no communication", "step faster by", "communication faster by"):
        table.add_column(column, justify="right")
    curves: dict[str, list[Runner]] = {}
    for title, work in {"digits, conv net": digits_work, "library sources, GPT": char_gpt_work}.items():
        make, batches = work()
        runners = [runner(name, make, name) for name in ("gloo", "smddp")] + [runner("alone", make, None)]
        for at in range(args.steps + WARM_UP):
            inputs, targets = next(batches)
            for i in range(3):
                runners[(at + i) % 3].step(inputs, targets)
        gloo, smddp, alone = (one.milliseconds() for one in runners)
        apart = max(abs(a - b) for a, b in zip(runners[0].losses, runners[1].losses, strict=True))
        if apart > 1e-3:
            raise RuntimeError(f"{title}: the losses over gloo and over smddp differ by {apart}")
        gain = (gloo - alone) / max(smddp - alone, 1e-3)
        cells = [f"{gloo:.2f}", f"{smddp:.2f}", f"{alone:.2f}", f"{gloo / smddp:.2f}x", f"{gain:.1f}x"]
        table.add_row(title, *cells)
        curves[title] = runners
    if dist.get_rank() == 0:
        Console(width=110).print(table)
        draw(curves, args.plot)
        print(f"losses over both backends agree in every step; plot: {args.plot}")
    dist.destroy_process_group()


def draw(curves: dict[str, list[Runner]], path: Path) -> None:
    """Loss over time spent, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(10, 4), layout="constrained", squeeze=False)
    for axes, (title, runners) in zip(panels[0], curves.items(), strict=True):
        for one in runners[:2]:
            spent = torch.tensor(one.seconds).cumsum(0).tolist()
            axes.plot(spent[WARM_UP:], one.losses[WARM_UP:], label=one.name)
        axes.set(title=title, xlabel="seconds", ylabel="loss")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
