"""The models that are split: chains of modules, so that a stage's time can be read at its borders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model, one microbatch's step, and the names of its equal layers."""

    name: str
    model: nn.Module
    step: Callable[[], Tensor]
    layers: list[str]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A transformer layer with the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(self.norm1(x))
        x = x + mixed
        out: Tensor = self.mlp(self.norm2(x))
        return x + out


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.token(ids) + self.position
        return out


def gpt(name: str, *, layers: int, width: int, vocabulary: int, batch: int = 4, length: int = 128) -> Subject:
    """A GPT as an ``nn.Sequential``: embedding, layers, last norm, head."""
    model = nn.Sequential(
        Embedding(vocabulary, length, width),
        *[Block(width, width // 32) for _ in range(layers)],
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))

    def step() -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return Subject(name, model, step, [str(index) for index in range(1, layers + 1)])


def mlp() -> Subject:
    """Sixteen equal linear layers."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(16)])
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    return Subject("MLP, 16 x 512", model, lambda: model(x).square().mean(), [str(i) for i in range(16)])


MODELS: list[Callable[[], Subject]] = [
    lambda: gpt("GPT, 12 x 256, 512 words", layers=12, width=256, vocabulary=512),
    lambda: gpt("GPT, 4 x 256, 16 Ki words (head-heavy)", layers=4, width=256, vocabulary=16384),
    mlp,
]
