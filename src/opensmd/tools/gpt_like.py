"""GPT-like models of known sizes on the meta device, which take no memory, for ``smd plan``.

smd plan opensmd.tools.gpt_like:gpt_175b --partitions 8 --tensor 8 --replicas 4 --precision bf16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["GPTLike", "gpt_125m", "gpt_175b", "gpt_1t"]

WORDS = 2048
VOCABULARY = 50304
Planned = tuple[nn.Module, tuple[Tensor, ...]]


class GPTLayer(nn.Module):
    """Attention and a perceptron, each after a norm and with a residual.

    Args:
        hidden: width.
        heads: of attention.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, with the shape of ``x``: batch, tokens, hidden."""
        parts = self.query_key_value(self.ln_1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dense(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))
        return out


class GPTLike(nn.Module):
    """Embeddings, layers, and a head that shares its weight with the token embedding.

    Args:
        layers, hidden, heads: sizes.
    """

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(WORDS, hidden)
        self.layers = nn.Sequential(*(GPTLayer(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token of ``ids`` (batch, tokens) from those before it."""
        places = torch.arange(ids.shape[1], device=ids.device)
        logits = self.head(self.norm(self.layers(self.words(ids) + self.positions(places))))
        loss: Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss


def gpt_125m() -> Planned:
    """125 million parameters, and one sequence."""
    return _on_meta(12, 768, 12)


def gpt_175b() -> Planned:
    """175 billion parameters, the sizes of GPT-3, and one sequence."""
    return _on_meta(96, 12288, 96)


def gpt_1t() -> Planned:
    """A trillion parameters, and one sequence."""
    return _on_meta(128, 25600, 160)


def _on_meta(layers: int, hidden: int, heads: int) -> Planned:
    with torch.device("meta"):
        return GPTLike(layers, hidden, heads), (torch.zeros(1, WORDS, dtype=torch.long),)
