"""Watching a model run: which unit each operation belongs to, what it costs, and which tensors cross.

Module hooks tell where the run is, a dispatch mode sees every operation below autograd, and a saved-tensor
hook sees what is kept for backward.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel._torch_internals import is_of_transform, watchers
from opensmd.modelparallel.dry_run._torch_internals import seeing_what_is_saved
from opensmd.modelparallel.dry_run.escaped_tensors import EscapeSearch, Made
from opensmd.modelparallel.dry_run.timing.clock import Clock
from opensmd.modelparallel.dry_run.timing.operation_trials import OperationTrials
from opensmd.modelparallel.dry_run.timing.unseen_work import UnseenWork
from opensmd.modelparallel.dry_run.weight_gradient_memory import LateGradients
from opensmd.modelparallel.dry_run.weight_terms import WeightTerms
from opensmd.modelparallel.planning.cost import cost_of
from opensmd.modelparallel.runtime.tensors.storages import StorageReference, StorageSet

__all__ = ["Observer"]


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Sums costs by unit and module while it is active."""

    def __init__(self, position: Clock, owners: dict[int, list[str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = position
        self.unseen = UnseenWork(lambda: position.current, position.now)
        self.owners = owners  # id of a parameter or buffer -> the modules that own it
        self.forward_seconds: dict[int, float] = defaultdict(float)
        self.backward_seconds: dict[int, float] = defaultdict(float)
        self.flops: dict[int, float] = defaultdict(float)
        self.activation_bytes: dict[int, int] = defaultdict(int)
        self.uses: dict[str, int] = {}
        self.hooked: set[str] = set()  # modules with forward hooks
        self.weights = WeightTerms(owners, position.stack, self.uses, self._in_leaf)
        self.bound: set[int] = set()  # ids of parameters that modules without children of their own have read
        self._leaves: frozenset[str] = frozenset()
        self._given: frozenset[int] = frozenset()  # ids of what the last module that was entered was given
        self.late = LateGradients(self._is_parameter)
        self.trials = OperationTrials(self._is_parameter)
        self.escapes = EscapeSearch(position.stack, self._made_by)
        self.operations: dict[str, int] = defaultdict(int)
        self.users: dict[int, set[int]] = defaultdict(set)  # id of a parameter -> units
        self.edges: dict[tuple[int, int, int], int] = defaultdict(int)  # source, target, tensor -> bytes
        self._made: dict[int, Made] = {}
        self._parameters = StorageSet()
        self._kept = StorageSet()
        self._count = 0
        self._packing = False  # whether the operation is this observer's own

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._packing:
            return func(*args, **kwargs)
        since = self.position.now()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        out = func(*args, **kwargs)
        unit = self.position.current
        if unit < 0 or not isinstance(func, torch._ops.OpOverload):
            return out  # before the model's first call: data that every rank has
        if self.weights.follows(inputs, out):
            unit = self.weights.unit_of(inputs, unit)  # runs where the weights live
        else:
            for tensor in inputs:
                self._consume(tensor, unit)
        of_parameter = func.is_view and any(self._is_parameter(tensor) for tensor in inputs)
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and (of_parameter or result not in self.weights):
                self._produce(result, unit, of_parameter=of_parameter)
        self.escapes.operation(inputs, out)
        differentiated = needs_gradient or self.unseen.differentiates
        cost = cost_of(func, args, kwargs, out, needs_gradient=differentiated)
        self.flops[unit] += cost.flops
        self.forward_seconds[unit] += cost.forward_seconds
        self.backward_seconds[unit] += cost.backward_seconds
        self.late.operation(func, args, inputs, out, unit, cost.forward_seconds)
        self.trials.note(func, args, kwargs, out, unit, cost, differentiated=differentiated)
        if self.position.stack:
            self.operations[self.position.stack[-1]] += 1
        self.unseen.operation(func, unit, since)
        return out

    def _consume(self, tensor: Tensor, unit: int) -> None:
        owners = self.owners.get(id(tensor))
        if owners is not None:
            inside = [name for name in owners if name in self.position.stack]
            for name in inside or owners[:1]:
                self.uses.setdefault(name, unit)
            self.users[id(tensor)].add(unit)
            if not inside and self._in_leaf() and id(tensor) not in self._given:
                self.bound.add(id(tensor))
            return
        for source, whole in self.weights.sources(tensor):
            self.uses.setdefault(self.owners[source][0], unit)
            if whole:
                self.users[source].add(unit)
        made = self._made_by(tensor)
        if made is not None and made.unit != unit:
            key = (made.unit, unit, made.number)
            self.edges[key] = max(self.edges[key], tensor.numel() * tensor.element_size())

    def _produce(self, tensor: Tensor, unit: int, *, of_parameter: bool) -> None:
        if tensor.layout is not torch.strided or self._made_by(tensor) is not None:
            return
        if of_parameter:  # a fake parameter has another storage than the real one
            self._parameters.add(tensor)
        elif not self._is_parameter(tensor):
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = Made(
                StorageReference(storage), unit, self._count, tuple(self.position.stack)
            )
            self._count += 1

    def _entered(self, module: nn.Module, args: Any) -> None:
        self._given = frozenset(id(leaf) for leaf in tree_leaves(args) if isinstance(leaf, nn.Parameter))
        self.escapes.entered(module, args)

    def _in_leaf(self) -> bool:
        """Whether a module runs that has no children: it runs as a whole on one rank, wherever that is."""
        return bool(self.position.stack) and self.position.stack[-1] in self._leaves

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether the tensor is a parameter, a buffer, or a view of one."""
        return id(tensor) in self.owners or tensor.layout is not torch.strided or tensor in self._parameters

    def _made_by(self, tensor: Tensor) -> Made | None:
        if tensor.layout is not torch.strided or is_of_transform(tensor):
            return None
        made = self._made.get(tensor.untyped_storage()._cdata)
        return None if made is None or made.storage.expired() else made

    @contextlib.contextmanager
    def watching(self, names: dict[nn.Module, str]) -> Iterator[None]:
        """Watch the calls of modules."""
        self._leaves = frozenset(name for module, name in names.items() if not any(module.children()))
        with (
            self.position.follow(names, self._entered, self.escapes.returned),
            self.unseen.watching_functions(),
        ):
            yield
            self.hooked = {name for module, name in names.items() if _has_further_hooks(module)}

    @property
    def doubtful(self) -> set[int]:
        """The units whose estimated seconds may have missed what they do."""
        return self.unseen.units(self.position.seconds, self.forward_seconds)

    def result(self, value: Any) -> None:
        """The run returned ``value``."""
        self.escapes.result(value)

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """A context that counts tensors kept for backward: each storage once, parameters not at all."""
        return seeing_what_is_saved(self._pack)

    def _pack(self, tensor: Tensor) -> Tensor:
        unit, since = self.position.current, self.position.now()
        if unit >= 0 and not self._is_parameter(tensor):
            self.late.save(tensor)
            if self._kept.add(tensor):
                self.activation_bytes[unit] += tensor.untyped_storage().nbytes()
        # What an operation returns, kept as it is, keeps its own graph alive for ever, and the model.
        self._packing = True
        try:
            return tensor.detach()
        finally:
            self._packing = False
            self.unseen.looked_on(unit, since)


def _has_further_hooks(module: nn.Module) -> bool:
    """Whether there are forward hooks besides the two of :meth:`Position.follow`."""
    return watchers(module) > 2
