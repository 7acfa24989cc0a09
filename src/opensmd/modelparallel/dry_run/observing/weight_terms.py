"""What is computed from weights alone, outside the modules that own them.

A penalty over all weights in the step function, or a moving average of weights, reads every parameter after
the model has run. That is no reason to put all modules on one rank: such an operation runs where its weights
live, and only a number leaves the rank. So the planner ignores these reads.

    weight of stage 0 ── square ── sum ──┐  one number
    weight of stage 1 ── square ── sum ──┴─ + ── loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.runtime.tensors.storages import StorageReference, has_storage

__all__ = ["WeightTerms"]

# A result of at least this share of a weight's size is the weight itself in another form: transposed, cast.
WHOLE = 1 / 2


class WeightTerms:
    """Follows operations on weights alone.

    Args:
        owners: names of the modules that own a parameter or buffer, by its id.
        stack: the running modules, outermost first.
        uses: the unit in which a module's own parameters were first used.
        in_leaf: whether a module runs that never runs piece by piece, so what it reads must be on its rank.
    """

    def __init__(
        self,
        owners: Mapping[int, Sequence[str]],
        stack: Sequence[str],
        uses: Mapping[str, int],
        in_leaf: Callable[[], bool],
    ) -> None:
        self._owners = owners
        self._stack = stack
        self._uses = uses
        self._in_leaf = in_leaf
        self._bytes: dict[int, int] = {}
        self._made: dict[int, tuple[StorageReference, frozenset[int]]] = {}

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._sources_of(tensor) is not None

    def follows(self, inputs: Sequence[Tensor], out: Any) -> bool:
        """Whether ``inputs`` are only weights of other modules, so that the results are followed."""
        sources: set[int] = set()
        for tensor in inputs:
            more = self._foreign(tensor)
            if more is None:
                return False
            sources |= more
        if not sources:
            return False
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor) not in self._owners and has_storage(tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageReference(storage), frozenset(sources)
        return True

    def unit_of(self, inputs: Sequence[Tensor], otherwise: int) -> int:
        """Return the last of the units that own these weights."""
        sources = {source for tensor in inputs for source in self._foreign(tensor) or ()}
        return max(self._uses.get(self._owners[source][0], otherwise) for source in sources)

    def sources(self, tensor: Tensor) -> Iterator[tuple[int, bool]]:
        """Yield ids of weights that ``tensor`` was computed from, and whether it is one in another form."""
        size = tensor.numel() * tensor.element_size()
        for source in self._sources_of(tensor) or ():
            yield source, size >= WHOLE * self._bytes[source]

    def _foreign(self, tensor: Tensor) -> frozenset[int] | None:
        """Return the weights that a tensor is made of; None if it contains data, or a module uses its own."""
        owners = self._owners.get(id(tensor))
        if owners is None:
            return self._sources_of(tensor)
        if any(name in self._stack for name in owners) or self._in_leaf():
            return None
        self._bytes[id(tensor)] = tensor.numel() * tensor.element_size()
        return frozenset([id(tensor)])

    def _sources_of(self, tensor: Tensor) -> frozenset[int] | None:
        if not self._made or not has_storage(tensor):
            return None
        storage, sources = self._made.get(tensor.untyped_storage()._cdata, (None, None))
        return None if storage is None or storage.expired() else sources
