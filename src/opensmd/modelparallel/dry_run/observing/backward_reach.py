"""Which operations will have a backward: those that a loss leads back to.

What no loss depends on, such as the last layers of an encoder whose results a decoder leaves out, is computed
forward only. An operation's graph nodes are known by the sequence numbers that were free before and after it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from opensmd.modelparallel.dry_run._torch_internals import made_by, number_of_next_node

__all__ = ["BackwardReach"]


class BackwardReach:
    """Notes operations and losses of one run."""

    def __init__(self) -> None:
        self._bounds = [0]  # rising: the numbers that were free after each differentiated operation
        self._reached: set[int] = set()  # those that have a loss

    def operation(self) -> int:
        """Note a differentiated operation; return a number for :meth:`has`."""
        number = number_of_next_node()
        if number > self._bounds[-1]:
            self._bounds.append(number)
        return number

    def losses(self, losses: Sequence[Tensor]) -> None:
        """Note that backward runs from these."""
        seen: set[torch.autograd.graph.Node] = set()
        waiting = [loss.grad_fn for loss in losses]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            number = made_by(node)
            if number is not None:
                # the node of a write into a view is created after the operation
                number -= node.name() == "torch::autograd::CopySlices"
                self._reached.add(bisect.bisect_right(self._bounds, number))

    def has(self, number: int) -> bool:
        """Whether the operation has a backward; it has if no loss is known."""
        return not self._reached or bisect.bisect_left(self._bounds, number) in self._reached
