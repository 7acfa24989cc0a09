"""torch's attention and Transformer layers, whole and cut inside, and attention in the glue."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Case, Layers, sequences

__all__ = ["CASES"]


class Attention(nn.Module):
    """Self-attention, then cross-attention with weights and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 3, batch_first=True, kdim=WIDTH, vdim=WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        a, nothing = self.inner(h, h, h, attn_mask=causal, need_weights=False)
        assert nothing is None
        b, weights = self.cross(a, h, h, need_weights=True)
        out: Tensor = self.head((b + h).mean(1) + weights.mean((1, 2))[:, None])
        return out


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class Encoder(nn.Module):
    """nn.TransformerEncoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer(), 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.encoder(self.embed(x), mask=mask, is_causal=True)
        out: Tensor = self.head(h[:, -1])
        return out


class Translator(nn.Module):
    """nn.Transformer: the memory of the encoder enters every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(
            WIDTH,
            2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=16,
            dropout=0.0,
            batch_first=True,
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.both(x, x.flip(1)).mean(1))
        return out


class InGlue(Layers):
    """Attention as a function between modules: sdpa, einsum, baddbmm."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        q, k, v = (
            one(x).view(rows, 5, 2, 6).transpose(1, 2) for one in (self.first, self.second, self.third)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        b = torch.matmul(scores, v)
        c = torch.baddbmm(v.flatten(0, 1), scores.flatten(0, 1), k.flatten(0, 1)).view_as(v)
        out: Tensor = self.head((a + b + c).transpose(1, 2).reshape(rows, 5, WIDTH).mean(1))
        return out


LAYERS = tuple(f"encoder.layers.{i}" for i in range(3))

CASES = (
    Case(
        "multihead attention",
        Attention,
        ("first", "inner", "cross", "head"),
        batch=sequences,
        fixed={2: {"projection elsewhere": {"inner.out_proj": 1, "cross": 1}}},
    ),
    Case(
        "encoder",
        Encoder,
        ("embed", *LAYERS, "head"),
        batch=sequences,
        fixed={
            2: {
                "inside layers": {
                    "encoder.layers.0.linear1": 1,
                    "encoder.layers.1.self_attn": 1,
                    "encoder.layers.2": 1,
                    "encoder.norm": 1,
                }
            }
        },
    ),
    Case(
        "encoder and decoder",
        Translator,
        (
            "both.encoder.layers.0",
            "both.encoder.layers.1",
            "both.decoder.layers.0",
            "both.decoder.layers.1",
            "head",
        ),
        batch=sequences,
    ),
    Case("attention in the glue", InGlue, batch=sequences),
)
