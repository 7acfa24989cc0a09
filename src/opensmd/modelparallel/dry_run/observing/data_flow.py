"""Which unit uses what another has produced: parameters, and tensors that would cross stages.

A tensor is identified by its storage, for as long as that lives, and a parameter by its id. What is computed
only from other modules' weights runs where these are, and makes no edge (:mod:`.weight_terms`)::

    unit 0   x ── layer ── h           h is produced in unit 0
                           │
    unit 1                 └─ layer    and used in unit 1: an edge of h's bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel._torch_internals import is_of_transform
from opensmd.modelparallel.dry_run.observing.escaped_tensors import Made
from opensmd.modelparallel.dry_run.observing.weight_terms import WeightTerms
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of
from opensmd.modelparallel.runtime.tensors.storages import StorageReference, StorageSet

__all__ = ["DataFlow"]


class DataFlow:
    """What units produce and use while a model runs.

    Args:
        stack: the modules being called, outermost first; changes while the model runs.
        owners: the modules that own a parameter or buffer, by its id.

    Attributes:
        uses: the unit in which a module's own parameters were first used.
        users: the units that use a parameter, by its id.
        bound: ids of parameters read by modules without children that do not own them.
        edges: bytes of tensors that one unit produces and another uses, by source, target and tensor.
    """

    def __init__(self, stack: Sequence[str], owners: dict[int, list[str]]) -> None:
        self.uses: dict[str, int] = {}
        self.users: dict[int, set[int]] = defaultdict(set)
        self.bound: set[int] = set()
        self.edges: dict[tuple[int, int, int], int] = defaultdict(int)
        self._stack = stack
        self._owners = owners
        self._weights = WeightTerms(owners, stack, self.uses, self._in_leaf)
        self._leaves: frozenset[str] = frozenset()
        self._given: frozenset[int] = frozenset()  # ids of the arguments of the module entered last
        self._made: dict[int, Made] = {}
        self._parameters = StorageSet()
        self._count = 0

    def watch(self, names: dict[nn.Module, str]) -> None:
        """Watch calls of these modules, by name, from now on."""
        self._leaves = frozenset(
            name for module, name in names.items() if next(module.children(), None) is None
        )

    def entered(self, args: Any) -> None:
        """Note that a module was called with ``args``."""
        self._given = frozenset(id(leaf) for leaf in tree_leaves(args) if isinstance(leaf, nn.Parameter))

    def operation(self, inputs: Sequence[Tensor], out: Any, unit: int, *, is_view: bool) -> int:
        """Note an operation in ``unit``; return the unit that it will run in."""
        if self._weights.follows(inputs, out):
            unit = self._weights.unit_of(inputs, unit)  # runs where the weights live
        else:
            for tensor in inputs:
                self._consume(tensor, unit)
        of_parameter = is_view and any(self.is_parameter(tensor) for tensor in inputs)
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and (of_parameter or result not in self._weights):
                self._produce(result, unit, of_parameter=of_parameter)
        return unit

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether the tensor is a parameter, a buffer, or a view of one."""
        return id(tensor) in self._owners or tensor.layout is not torch.strided or tensor in self._parameters

    def made_by(self, tensor: Tensor) -> Made | None:
        """Return what is known about a tensor that a unit has produced."""
        if tensor.layout is not torch.strided or is_of_transform(tensor):
            return None
        made = self._made.get(tensor.untyped_storage()._cdata)
        return None if made is None or made.storage.expired() else made

    def _consume(self, tensor: Tensor, unit: int) -> None:
        owners = self._owners.get(id(tensor))
        if owners is not None:
            inside = [name for name in owners if name in self._stack]
            for name in inside or owners[:1]:
                self.uses.setdefault(name, unit)
            self.users[id(tensor)].add(unit)
            if not inside and self._in_leaf() and id(tensor) not in self._given:
                self.bound.add(id(tensor))
            return
        for source, whole in self._weights.sources(tensor):
            self.uses.setdefault(self._owners[source][0], unit)
            if whole:
                self.users[source].add(unit)
        made = self.made_by(tensor)
        if made is not None and made.unit != unit:
            key = (made.unit, unit, made.number)
            self.edges[key] = max(self.edges[key], size_of(tensor))

    def _produce(self, tensor: Tensor, unit: int, *, of_parameter: bool) -> None:
        if tensor.layout is not torch.strided or self.made_by(tensor) is not None:
            return
        if of_parameter:  # a fake parameter's storage differs from the real one's
            self._parameters.add(tensor)
        elif not self.is_parameter(tensor):
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = Made(
                StorageReference(storage), unit, self._count, tuple(self._stack)
            )
            self._count += 1

    def _in_leaf(self) -> bool:
        """Whether a module without children is running, and so runs as a whole on some rank."""
        return bool(self._stack) and self._stack[-1] in self._leaves
