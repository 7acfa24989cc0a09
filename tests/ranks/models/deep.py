"""Models with enough layers for eight stages and more."""

from __future__ import annotations

from torch import Tensor, nn

from tests.ranks.models.case import CLASSES, WIDTH, Case, sequences

__all__ = ["CASES"]


def perceptron() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(11)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Transformer(nn.Module):
    """Ten encoder layers between an embedding and a head that also sees the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(10)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head((h + start).mean(1))
        return out


ROWS = 24  # for three stages, whose schedules in a loop want a multiple of three microbatches, too

CASES = (
    Case("perceptron", perceptron, tuple(str(number) for number in range(12)), rows=ROWS),
    Case(
        "transformer",
        Transformer,
        ("embed", *(f"layers.{i}" for i in range(10)), "head"),
        batch=sequences,
        rows=ROWS,
    ),
)
