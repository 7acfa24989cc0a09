"""What the clients train, and the comparison of two backends by it.

Every client trains the same small model on the same rows, each rank on its own half, first over gloo and then
over smddp. What a client does with a backend (which ranks get which rows, what is summed, what is saved) must
come out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["Trained", "assert_trains_as_over_gloo", "net", "rows", "trained"]

LEAST_STEPS = 4


@dataclass(frozen=True)
class Trained:
    """What a rank has after its training: its losses in order, the whole weights, and what else it found."""

    backend: str
    losses: list[float]
    weights: dict[str, Tensor]
    found: dict[str, Any]


class Runs(Protocol):
    """A pool of two ranks."""

    def __call__(self, function: Any, *args: Any, backend: str | None = None) -> list[Any]: ...


def rows(count: int = 32) -> TensorDataset:
    """Rows with a rule behind them, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :2].sin() + inputs[:, 2:4])


def net() -> nn.Sequential:
    """The model, with the same weights on all ranks."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def trained(losses: Sequence[float], weights: dict[str, Tensor], **found: Any) -> Trained:
    """What to give back from a rank, while the group that it trained over is still there."""
    kept = {name: tensor.detach().clone() for name, tensor in weights.items()}
    return Trained(dist.get_backend(), [float(loss) for loss in losses], kept, found)


def assert_trains_as_over_gloo(runs: Runs, train: Any, *args: Any) -> None:
    """``train(backend, *args)`` comes out over smddp as over gloo, and both ranks have taken part."""
    expected = runs(train, "gloo", *args)
    assert_trained_alike(expected, runs(train, "smddp", *args))


def assert_trained_alike(expected: Sequence[Trained], found: Sequence[Trained]) -> None:
    """Two ranks have trained over smddp what two others have trained over gloo."""
    assert [rank.backend for rank in expected] == ["gloo"] * 2
    assert [rank.backend for rank in found] == ["smddp"] * 2
    assert len(found[0].losses) >= LEAST_STEPS
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after.losses, before.losses)
        torch.testing.assert_close(after.weights, before.weights)
        torch.testing.assert_close(after.found, before.found)
    torch.testing.assert_close(found[0].weights, found[1].weights)
    assert sum(found[0].losses[-2:]) < sum(found[0].losses[:2]), "it has not learned anything"
