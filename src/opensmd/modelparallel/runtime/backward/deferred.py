"""A backward that a microbatch has requested and that runs when its gradient has arrived.

Most step functions end with their backward. So a backward whose gradient is still in transit is deferred,
instead of making the function wait, which would occupy a thread for its stack; usually the function then
returns at once. If it continues with something that might see the gradients, or change what they are computed
from, the backward runs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from opensmd.modelparallel.runtime.messages.message import Message

__all__ = ["DeferredBackward", "Leg"]


@dataclass(slots=True)
class Leg:
    """A part of a backward: from where gradients arrive at this rank to where they leave it.

    Attributes:
        roots: where it starts, including tokens of sent tensors.
        gradients: theirs.
        awaited: the messages of which it would immediately wait for one.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor]
    awaited: list[Message]


@dataclass(slots=True)
class DeferredBackward:
    """One backward on this rank.

    Attributes:
        legs: the remaining legs, the next one first.
        retain_graph: keep the graph for another one.
    """

    legs: list[Leg]
    retain_graph: bool

    @property
    def awaited(self) -> list[Message]:
        """The messages of which it would immediately wait for one."""
        return self.legs[0].awaited
