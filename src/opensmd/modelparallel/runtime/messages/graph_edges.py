"""Where the graph of one microbatch leaves this rank and comes back.

Each tensor that travels while gradients are enabled is an edge between two ranks, numbered by its program
point. Every rank counts all edges, and has tokens for its own::

    rank 0   x ─ layer ─ h ──┐ token 1                       backward passes edge 1
                             │
    rank 1                   └─ token 1 ─ layer ─ k ──┐ token 2             2, then 1
                                                      │
    rank 2                                            └─ token 2 ─ layer ─ loss     2

On each rank, backward starts at its roots and at the tokens of the edges that these depend on. torch runs a
thread's nodes in reverse order of creation, so each rank passes its edges from the highest number to the
lowest: rank 1 waits for the gradient of edge 2, and then sends that of edge 1. Both ends of an edge have the
same number, and each waits only after all higher ones have been passed. So ranks cannot deadlock, whatever
the placement.
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
    """The sender of a received tensor, and the tensor's shape."""

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
        """Note that a tensor with this tag travels at program point ``number``, between any two ranks."""
        self._of_tags.setdefault(tag, []).append(number)

    def leave(self, number: int, token: Tensor, gradient: list[Message]) -> None:
        """Note that a tensor has left this rank; one of the messages ``gradient`` will bring its gradient."""
        self._tokens[number] = token
        self._gradients[number] = gradient

    def arrive(self, number: int, token: Tensor, origin: Origin) -> None:
        """Note that a tensor has arrived at this rank."""
        self._tokens[number] = token
        self._origins[number] = origin

    def kept(self) -> Iterator[Origin]:
        """Return received tensors whose existing gradients no backward has sent back."""
        for number, origin in self._origins.items():
            token = self._tokens[number]  # None if a backward has started at it
            if token is not None and keeps_gradient(token):
                yield origin

    def has_been_passed(self, number: int) -> bool:
        """Whether a backward that does not retain the graph has passed that edge, between any two ranks."""
        return number in self._passed

    def behind(self, roots: Sequence[Tensor], *, keep: bool = True) -> list[int]:
        """Return this rank's edges that ``roots`` depend on, in order of creation.

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
                # The rest are edges between other ranks, which are only counted here.
                edges += [number for number in numbers if number in self._tokens]
        # In order of creation, which autograd reverses: the last one is passed first.
        edges.sort()
        return edges

    def tokens(self, edges: Sequence[int], *, keep: bool) -> list[Tensor]:
        """Return the tokens of edges, where backward starts.

        Raises:
            RuntimeError: backward has already passed one of them.
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
                # Not deleted, so that a second backward of the edge notices the first.
                self._tokens[number] = None
        return tokens

    def legs(self, edges: Sequence[int]) -> list[list[int]]:
        """Return ``edges`` in backward order, cut where a gradient arrives after others have left.

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
        """Return the messages that the latest edge waits for, if it is that of a sent tensor."""
        return self._gradients.get(edges[-1], []) if edges else []

    def release(self) -> None:
        """Release tokens and tags."""
        self._of_tags.clear()
        self._tokens.clear()
        self._gradients.clear()
        self._origins.clear()
        self._passed.clear()
