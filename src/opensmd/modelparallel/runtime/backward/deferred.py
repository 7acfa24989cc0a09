"""A backward that a microbatch has called for and that runs when its gradient has come.

Most step functions end with their backward. So one whose gradient is still on its way is deferred instead of
keeping the function, and a thread for its stack, waiting; the function usually returns at once. If it goes on
with something that might see the gradients, or change what they are computed from, the backward comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from opensmd.modelparallel.runtime.messages.message import Message

__all__ = ["DeferredBackward", "Leg"]


@dataclass(slots=True)
class Leg:
    """A part of a backward: from where its gradients come to this rank to where they leave it.

    Attributes:
        roots: what it begins at, tokens of sent tensors included.
        gradients: theirs.
        awaited: the messages of which it would wait for one at once.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor]
    awaited: list[Message]


@dataclass(slots=True)
class DeferredBackward:
    """One backward on this rank.

    Attributes:
        legs: what is left of it, the next one first.
        retain_graph: keep the graph for another one.
    """

    legs: list[Leg]
    retain_graph: bool

    @property
    def awaited(self) -> list[Message]:
        """The messages of which it would wait for one at once."""
        return self.legs[0].awaited
