"""A schedule's table, followed action by action: what layers, autograd and messages take without a runtime.

The order is strict, the shapes are known, every chunk has one tensor to take and one to give. So whatever a
runtime does beyond this loop (any program, any order of arrival, errors that say where) is what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from opensmd.collectives.mailbox import Mailbox
from opensmd.modelparallel.planning.schedules.tables import Action, Table

__all__ = ["ByHand"]

Loss = Callable[[Tensor, int], Tensor]


class ByHand:
    """One rank's row of a table; call it for a step.

    Args:
        table: with weight gradients apart only where a chunk computes those of its input without them.
        rank: this one.
        chunks: this rank's pieces of the model.
        inputs: of every microbatch, for the model's first stage.
        between: a tensor like those that travel.
        loss: of what the last stage returns for a microbatch.
    """

    def __init__(
        self,
        table: Table,
        rank: int,
        chunks: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        between: Tensor,
        loss: Loss,
    ) -> None:
        self._row, self._splits, self._stages = table.rows[rank], table.splits, table.stages[rank]
        self._ranks = {stage: rank for rank, own in enumerate(table.stages) for stage in own}
        self._rank, self._chunks, self._inputs, self._loss = rank, chunks, inputs, loss
        self._weights = [list(chunk.parameters()) for chunk in chunks]
        self._between = between
        self._mailbox = Mailbox()
        self._here: dict[int, Tensor] = {}  # what goes from one stage to the next on this rank, by tag
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self._do: Mapping[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "W": self._weight_gradients,
        }

    def __call__(self) -> None:
        """One step."""
        for action in self._row:
            self._do[action.kind](action)
        self._mailbox.flush()

    def _forward(self, action: Action) -> None:
        _, microbatch, chunk = action
        stage = self._stages[chunk]
        x = self._inputs[microbatch] if stage == 0 else self._receive(stage - 1, _tag(0, stage, microbatch))
        if stage or self._splits:
            x = x.detach().requires_grad_()
        out = self._chunks[chunk](x)
        if stage + 1 < len(self._ranks):
            self._send(stage + 1, _tag(0, stage + 1, microbatch), out.detach())
            self._graphs[microbatch, chunk] = x, out, None
        else:
            loss = self._loss(out, microbatch)
            self._graphs[microbatch, chunk] = x, loss, torch.ones_like(loss)

    def _backward(self, action: Action) -> None:
        _, microbatch, chunk = action
        stage = self._stages[chunk]
        x, out, gradient = self._graphs.pop((microbatch, chunk))
        if gradient is None:
            gradient = self._receive(stage + 1, _tag(1, stage, microbatch))
        if self._splits:
            (back,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
            self._graphs[microbatch, chunk] = x, out, gradient
        else:
            torch.autograd.backward(out, gradient)
            back = x.grad
        if stage:
            assert back is not None
            self._send(stage - 1, _tag(1, stage - 1, microbatch), back)

    def _weight_gradients(self, action: Action) -> None:
        _, microbatch, chunk = action
        _, out, gradient = self._graphs.pop((microbatch, chunk))
        torch.autograd.backward(out, gradient, inputs=self._weights[chunk])

    def _send(self, stage: int, tag: int, data: Tensor) -> None:
        if self._ranks[stage] == self._rank:
            self._here[tag] = data
        else:
            self._mailbox.send(self._ranks[stage], tag, data)

    def _receive(self, stage: int, tag: int) -> Tensor:
        if self._ranks[stage] == self._rank:
            return self._here.pop(tag)
        count = self._between.numel()
        found = self._mailbox.receive(self._ranks[stage], tag, count, self._between.dtype)
        return found.view(self._between.shape)


def _tag(kind: int, stage: int, microbatch: int) -> int:
    return kind << 30 | stage << 15 | microbatch
