"""What is trained: models as ``nn.Sequential``, so that torch can be given the same stages by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.partition.models import Block, Embedding

__all__ = ["ALONE", "CASES", "EMPTY", "OURS", "SINGLE", "TORCH", "Case"]

# The candidates, by name.
SINGLE, TORCH, OURS, ALONE = "one process", "torch 1F1B", "opensmd", "stages alone"

EMPTY = "two nn.Linear(4, 4), next to nothing to compute"

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """``build`` makes the model, ``batch(m)`` the data of m microbatches. Its children from ``first`` on are
    ``layers`` equal ones; what is before and behind them belongs to the first and the last stage. With
    ``automatic`` our partitioner chooses instead."""

    title: str
    build: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Loss
    layers: int
    first: int = 0
    automatic: bool = False

    @property
    def half(self) -> int:
        """The child at which the second of two stages begins."""
        return self.cuts(2)[0]

    def cuts(self, stages: int) -> list[int]:
        """The children at which the second of so many stages and those behind it begin.

        Raises:
            SystemExit: equal layers cannot be so many equal stages.
        """
        if self.layers % stages:
            raise SystemExit(f"{self.title}: {self.layers} layers are not {stages} equal stages")
        return [self.first + stage * self.layers // stages for stage in range(1, stages)]

    def stages(self, whole: nn.Sequential, count: int) -> list[nn.Sequential]:
        """``whole`` in so many stages."""
        cuts = [0, *self.cuts(count), len(whole)]
        return [whole[begin:end] for begin, end in itertools.pairwise(cuts)]


def _gpt(layers: int, width: int, vocabulary: int, length: int) -> nn.Sequential:
    return nn.Sequential(
        Embedding(vocabulary, length, width),
        *[Block(width, width // 32) for _ in range(layers)],
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )


def _text(vocabulary: int, rows: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (rows * microbatches, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def _rows(rows: int, width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(microbatches: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows * microbatches, width, generator=torch.Generator().manual_seed(0))
        return x, x.flip(0)

    return batch


def _next_token(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _mlp(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])


CASES = {
    "gpt": Case(
        "GPT, 8 x 192, compute-bound",
        lambda: _gpt(8, 192, 256, 64),
        _text(256, 2, 64),
        _next_token,
        layers=8,
        first=1,
    ),
    "mlp": Case("MLP, 8 x 512, compute-bound", lambda: _mlp(8, 512), _rows(256, 512), F.mse_loss, layers=8),
    "wide": Case(
        "MLP, 4 x 64, activations of 8 MiB", lambda: _mlp(4, 64), _rows(32768, 64), F.mse_loss, layers=4
    ),
    "tiny": Case(
        "GPT, 4 x 64, tiny microbatches",
        lambda: _gpt(4, 64, 64, 16),
        _text(64, 1, 16),
        _next_token,
        layers=4,
        first=1,
    ),
    "head": Case(
        "GPT, 4 x 192, 8 Ki words: head-heavy, our stages against equal layers",
        lambda: _gpt(4, 192, 8192, 64),
        _text(8192, 2, 64),
        _next_token,
        layers=4,
        first=1,
        automatic=True,
    ),
    "empty": Case(
        EMPTY, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), _rows(1, 4), F.mse_loss, layers=2
    ),
}
