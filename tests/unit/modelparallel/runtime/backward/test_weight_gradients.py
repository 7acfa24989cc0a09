"""A backward in two parts, in one process: what its first part keeps in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.backward.weight_gradients import first_part
from opensmd.modelparallel.runtime.messages.edges import receive_edge
from opensmd.modelparallel.runtime.tensors.storages import StorageReference
from opensmd.native import core

DEPTH = 4


class Stage:
    """The graph of layers between a received tensor and a loss.

    Args:
        sent: called when the gradient of the received tensor is sent, the last that the first part does.

    Attributes:
        weights: one of each layer.
        inputs: what the gradients of weights are computed from.
        saved: what the layers' activations have kept for the way back.
    """

    def __init__(self, sent: Callable[[], None]) -> None:
        def send(gradient: Tensor | None) -> None:
            assert gradient is not None
            sent()

        self.weights = [nn.Parameter(torch.eye(8)) for _ in range(DEPTH)]
        self.inputs: list[StorageReference] = []
        self.saved: list[StorageReference] = []
        hidden, self._token = receive_edge(torch.full((8, 8), 0.1), send)
        for weight in self.weights:
            self.inputs.append(StorageReference(hidden.untyped_storage()))
            powers = (hidden @ weight).exp()
            hidden = powers.tanh()
            self.saved += [StorageReference(each.untyped_storage()) for each in (powers, hidden)]
        self._loss = hidden.sum()

    def split(self) -> core.SplitBackward:
        """Its backward in two parts, which is all that keeps the graph from now on."""
        token = self._token.detach()
        split = first_part([self._loss, self._token], [torch.ones(()), token], everything=False)
        assert split is not None
        del self._loss, self._token
        return split


def alive(storages: list[StorageReference]) -> int:
    return sum(not each.expired() for each in storages)


def test_the_first_part_lets_go_of_what_it_has_used_as_it_runs() -> None:
    left: list[tuple[int, int]] = []
    stage = Stage(sent=lambda: left.append((alive(stage.inputs), alive(stage.saved))))
    split = stage.split()
    assert alive(stage.saved) == 2 * DEPTH
    split.run_first()
    # Where its gradient leaves: the weights' inputs alone are kept. A layer's result is the next one's input.
    assert left == [(DEPTH, DEPTH - 1)]
    split.run_weights()
    assert (alive(stage.inputs), alive(stage.saved)) == (0, 0)
    for weight in stage.weights:
        assert weight.grad is not None
