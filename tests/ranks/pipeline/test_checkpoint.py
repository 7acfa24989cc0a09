"""Checkpoints of models that steps have split: any number of partitions, replicas, plain PyTorch, kills."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.init import shutdown
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool, Ranks, run_once

LETTERS, WIDTH, ROWS = 11, 8, 8


class Counter(nn.Module):
    """Passes its input on and counts rows in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x + self.shift


class Writer(nn.Module):
    """Tied embeddings at both ends, layers and a buffer between."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), Counter(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.letters(text)))
        return out


def build() -> tuple[Writer, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Writer()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(LETTERS, (ROWS, 4), generator=torch.Generator().manual_seed(step))
    return text, (3 * text + 1) % LETTERS


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of plain PyTorch."""
    losses = []
    for text, target in map(batch, steps):
        loss = F.cross_entropy(model(text).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@smp.step
def train_step(model: Any, text: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(model(text).flatten(0, 1), target.flatten())
    model.backward(loss)
    return loss


def start(partitions: int) -> tuple[Any, Any]:
    shutdown()
    smp.init({"partitions": partitions, "microbatches": 2, "ddp": True})
    module, optimizer = build()
    return smp.DistributedModel(module), smp.DistributedOptimizer(optimizer)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """The losses of the whole batches, averaged over replicas."""
    losses = []
    for text, target in map(batch, steps):
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        optimizer.zero_grad()
        loss = train_step(model, text[mine], target[mine]).reduce_mean().item()
        optimizer.step()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
    return losses


def save_all(folder: str, partitions: int) -> list[str]:
    """Train three steps, save in every way, and tell what lives here."""
    model, optimizer = start(partitions)
    train(model, optimizer, range(3))
    if smp.dp_rank() == 0:
        parts = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "step": 3}
        smp.save(parts, f"{folder}/part.pt", partial=True)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        if smp.rank() == 0:
            smp.save(whole, f"{folder}/full.pt", partial=False)
    smp.save_checkpoint(folder, "tag", model=model, optimizer=optimizer, user_content={"step": 3})
    smp.barrier()
    names = [name for name, _ in model.local_named_parameters()]
    shutdown()
    return names


def load(kind: str, folder: str, model: Any, optimizer: Any) -> int:
    if kind == "tag":
        content = smp.resume_from_checkpoint(folder)
    else:
        content = smp.load(f"{folder}/{kind}", partial=kind == "part.pt")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    return int(content["step"])


def resume_all(folder: str, partitions: int) -> list[tuple[str, list[float], int]]:
    """Losses of the next three steps after loading each kind, before and after the first step."""
    found = []
    for kind, placed in itertools.product(("part.pt", "full.pt", "plain.pt", "tag"), (False, True)):
        model, optimizer = start(partitions)
        if placed:
            train(model, optimizer, range(1))
        step = load(kind, folder, model, optimizer)
        losses = train(model, optimizer, range(step, step + 3))
        seen = int(model.state_dict()["layers.2.seen"])
        found.append((f"{kind}, {placed}", losses, seen))
    shutdown()
    return found


@pytest.mark.parametrize(
    ("ranks", "partitions", "others"),
    [(2, 2, [(1, 1), (2, 2), (4, 4), (4, 2)]), (4, 4, [(2, 2)]), (4, 2, [(2, 2)]), (1, 1, [(2, 2)])],
)
def test_what_one_split_saved_another_split_goes_on_with(
    pool: Callable[[int], RankPool],
    tmp_path: Path,
    ranks: int,
    partitions: int,
    others: list[tuple[int, int]],
) -> None:
    places = pool(ranks).run(save_all, str(tmp_path), partitions)
    assert all(places[:partitions]), "every part has parameters"
    assert sorted(itertools.chain(*places[:partitions])) == sorted(n for n, _ in Writer().named_parameters())
    module, optimizer = build()
    plain(module, optimizer, range(3))
    torch.save(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "plain.pt"
    )
    wanted = plain(module, optimizer, range(3, 6))
    for loading_ranks, loading_partitions in others:
        for outcome in pool(loading_ranks).run(resume_all, str(tmp_path), loading_partitions):
            for kind, losses, seen in outcome:
                assert losses == pytest.approx(wanted, rel=2e-6), (loading_ranks, loading_partitions, kind)
                replicas = loading_ranks // loading_partitions
                assert seen >= 3 * ROWS // replicas, kind


def test_plain_pytorch_goes_on_with_a_full_checkpoint(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(save_all, str(tmp_path), 2)
    module, optimizer = build()
    wanted = plain(module, optimizer, range(6))[3:]
    saved = torch.load(tmp_path / "full.pt")
    assert list(saved["model"]) == list(module.state_dict())
    module, optimizer = build()
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert int(module.state_dict()["layers.2.seen"]) == 3 * ROWS
    assert plain(module, optimizer, range(3, 6)) == pytest.approx(wanted, rel=2e-6)


def save_after_every_step(folder: str) -> None:
    """Until this rank is killed, or finds that the other one was."""
    model, optimizer = start(2)
    for step in range(200):
        train(model, optimizer, range(step, step + 1))
        parts = {
            "model": model.local_state_dict(),
            "optimizer": optimizer.local_state_dict(),
            "step": step + 1,
        }
        smp.save(parts, f"{folder}/part.pt", partial=True)
        if step == 3:
            (Path(folder) / "saved").touch()
    while True:  # who kills may be late
        smp.barrier()


def killer(folder: Path, victims: list[int]) -> Callable[[Ranks], None]:
    def kill(ranks: Ranks) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (folder / "saved").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        for victim in victims:
            os.kill(ranks.pids[victim], signal.SIGKILL)

    return kill


def resume_part(folder: str, partitions: int) -> tuple[int, list[float]]:
    model, optimizer = start(partitions)
    step = load("part.pt", folder, model, optimizer)
    losses = train(model, optimizer, range(step, step + 2))
    shutdown()
    return step, losses


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_kill_while_training_and_saving_leaves_a_checkpoint_to_go_on_with(
    pool: Callable[[int], RankPool], tmp_path: Path, victims: list[int]
) -> None:
    outcomes = run_once(
        2,
        save_after_every_step,
        str(tmp_path),
        meanwhile=killer(tmp_path, victims),
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == ("died" if rank in victims else "error"), outcome
    (step, losses), *_ = pool(2).run(resume_part, str(tmp_path), 2)
    assert step >= 4
    module, optimizer = build()
    assert losses == pytest.approx(plain(module, optimizer, range(step + 2))[step:], rel=1e-4)
    assert pool(1).run(resume_part, str(tmp_path), 1)[0][0] == step
