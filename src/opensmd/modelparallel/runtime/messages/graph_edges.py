"""Where the graph of one microbatch leaves this rank, and comes to it.

Each tensor that travels while gradients are wanted is an edge between two ranks, numbered by the program
point at which it travels. Every rank counts all edges; it has tokens of those that touch it::

    rank 0   x ─ layer ─ h ──┐ token 1                       backward passes edge 1
                             │
    rank 1                   └─ token 1 ─ layer ─ k ──┐ token 2             2, then 1
                                                      │
    rank 2                                            └─ token 2 ─ layer ─ loss     2

Backward begins on each rank at its roots and at the tokens of the edges that these depend on. torch runs the
nodes of a thread in the reverse order of their creation, so each rank passes its edges from the highest
number to the lowest: rank 1 waits for the gradient of edge 2, and then sends that of edge 1. Both ends of an
edge have the same number, and each waits only after all higher ones have been passed: so whatever the
placement, no ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from opensmd.modelparallel.runtime.messages.edges import keeps_gradient
from opensmd.modelparallel.runtime.messages.message import Message
from opensmd.modelparallel.runtime.tensors.tags import Tag, ancestors, tags_of

__all__ = ["GraphEdges", "Origin"]


class Origin(NamedTuple):
    """The rank that has sent a tensor which has come, and the tensor's shape."""

    source: int
    shape: Sequence[int]


class GraphEdges:
    """The edges of one microbatch."""

    def __init__(self) -> None:
        self._of_tags: dict[Tag, list[int]] = {}
        self._tokens: dict[int, Tensor | None] = {}
        self._gradients: dict[int, list[Message]] = {}
        self._origins: dict[int, Origin] = {}
        self._passed: set[int] = set()

    def count(self, tag: Tag, number: int) -> None:
        """A tensor with this tag travels at program point ``number``, between whichever ranks."""
        self._of_tags.setdefault(tag, []).append(number)

    def leave(self, number: int, token: Tensor, gradient: list[Message]) -> None:
        """A tensor has left this rank; ``gradient`` are the messages of which one tells of its gradient."""
        self._tokens[number] = token
        self._gradients[number] = gradient

    def arrive(self, number: int, token: Tensor, origin: Origin) -> None:
        """A tensor has come to this rank."""
        self._tokens[number] = token
        self._origins[number] = origin

    def kept(self) -> Iterator[Origin]:
        """The tensors that have come, whose gradients no backward has sent back although there are some."""
        for number, origin in self._origins.items():
            token = self._tokens[number]  # None where a backward has begun at it
            if token is not None and keeps_gradient(token):
                yield origin

    def has_been_passed(self, number: int) -> bool:
        """Whether a backward that keeps no graph has been through that edge, between whichever ranks."""
        return number in self._passed

    def behind(self, roots: Sequence[Tensor], *, keep: bool = True) -> list[int]:
        """The edges at this rank that ``roots`` depend on, in order of creation.

        Args:
            keep: they, and those between others, can be passed again.
        """
        if not self._of_tags:
            return []
        ancestry = ancestors([tag for tag in tags_of(roots) if tag is not None])
        edges: list[int] = []
        for tag, numbers in self._of_tags.items():
            if tag in ancestry:
                if not keep:
                    self._passed.update(numbers)
                # The others are edges between other ranks: counted here, and touched nowhere.
                edges += [number for number in numbers if number in self._tokens]
        # In the order of creation, the reverse of which is that of autograd: the last one is passed first.
        edges.sort()
        return edges

    def tokens(self, edges: Sequence[int], *, keep: bool) -> list[Tensor]:
        """The tokens of edges, which backward begins at.

        Raises:
            RuntimeError: backward has been through one of them already.
        """
        tokens = []
        for number in edges:
            token = self._tokens[number]
            if token is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: specify retain_graph=True in the "
                    "first backward of this microbatch"
                )
            tokens.append(token)
            if not keep:
                # Not deleted: a second backward of the edge must find that there has been one.
                self._tokens[number] = None
        return tokens

    def legs(self, edges: Sequence[int]) -> list[list[int]]:
        """``edges`` in the order of backward, cut where a gradient comes after others have left.

        The first run is that of this rank's own roots; it may be empty.
        """
        legs: list[list[int]] = [[]]
        waits = False
        for number in reversed(edges):
            if number in self._gradients:
                if not waits:
                    legs.append([])
                waits = True
            else:
                waits = False
            legs[-1].append(number)
        return legs

    def first_gradient(self, edges: Sequence[int]) -> list[Message]:
        """The messages of which the latest edge waits for one, if that edge is a sent tensor's."""
        return self._gradients.get(edges[-1], []) if edges else []

    def release(self) -> None:
        """Let go of tokens and tags."""
        self._of_tags.clear()
        self._tokens.clear()
        self._gradients.clear()
        self._origins.clear()
        self._passed.clear()
