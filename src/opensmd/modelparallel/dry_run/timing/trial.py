"""Trials of single operations on made-up data: forwards of several, and then their backwards, as in a step.

So caches are about as cold as in a step: weights have last been used a round before, and what a backward
needs has been written before other operations ran. What the previous operation would have left in the caches
is read first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch

__all__ = ["BackwardTimer", "Given", "TriedOperation", "Trial", "Tried", "tensors_in"]

NOTHINGS = 25  # trials of doing nothing


class Given(NamedTuple):
    """A tensor argument of an operation; ``kept`` ones, such as weights, are no longer in the caches."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    kept: bool

    @property
    def span(self) -> int:
        """The number of elements between its first and its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def made(self) -> Tensor:
        """Create one like it, with values that every function accepts."""
        tensor = torch.empty(self.span, dtype=self.dtype, device="cpu").uniform_(0.1, 1.0)
        return tensor.as_strided(self.shape, self.stride).requires_grad_(self.requires_grad)


class TriedOperation(NamedTuple):
    """Identifies calls that take the same time."""

    func: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    structure: TreeSpec
    differentiated: bool

    @property
    def given(self) -> list[Given]:
        """Its tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Given)]


class Tried(NamedTuple):
    """Seconds of an operation."""

    forward: float
    backward: float


class Trial:
    """An operation with made-up arguments, which are kept for all rounds.

    Args:
        operation: what to run.
        backward_share: the backward's time relative to the forward's, where it cannot be run by itself.

    Attributes:
        operation: what is run.
    """

    def __init__(self, operation: TriedOperation, backward_share: float) -> None:
        self.operation = operation
        self._backward_share = backward_share
        self._made = [leaf.made() if isinstance(leaf, Given) else leaf for leaf in operation.leaves]
        self._results: list[Tensor] = []
        self._forward = 0.0

    def forward(self, engine: BackwardTimer) -> None:
        """Run it, and keep its graph."""
        operation = self.operation
        with torch.set_grad_enabled(operation.differentiated):
            # what is written in place must not be a leaf
            writes = operation.func._schema.is_mutable
            given = [leaf.clone() if writes and isinstance(leaf, Tensor) else leaf for leaf in self._made]
            _read(given, operation.leaves)
            args, kwargs = tree_unflatten(given, operation.structure)
            start = engine.stopwatch.now()
            out = operation.func(*args, **kwargs)
            self._forward = max(0.0, engine.stopwatch.now() - start - engine.to_call)
        self._results = tensors_in(out)

    def backward(self, engine: BackwardTimer) -> Tried:
        """Run its backward, if any; return the seconds of both."""
        results, self._results = self._results, []
        if not self.operation.differentiated:
            return Tried(self._forward, 0.0)
        roots = [result for result in results if result.requires_grad][:1]
        inputs = [leaf for leaf in self._made if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not (roots and inputs):  # inside a function with its own backward
            return Tried(self._forward, self._forward * self._backward_share)
        return Tried(self._forward, engine.seconds(roots, inputs, [torch.ones_like(roots[0])]))


class BackwardTimer:
    """Times backwards of single operations; starting one takes time that a step needs only once.

    Attributes:
        stopwatch: also for forwards.
        to_call: the cost of calling an operation from here, which a step does not have.
    """

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._leaf = torch.ones(4, device="cpu", requires_grad=True)
        self._to_begin = 0.0
        self._to_begin = statistics.median(self._of_nothing() for _ in range(NOTHINGS))
        self.to_call = statistics.median(self._call_of_nothing() for _ in range(NOTHINGS))

    def seconds(self, roots: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> float:
        """Return the time of the nodes between ``roots`` and ``inputs``."""
        self._of_nothing()  # brings the engine's own code into the caches
        return max(0.0, self._taken(roots, inputs, gradients) - self._to_begin)

    def _call_of_nothing(self) -> float:
        start = self.stopwatch.now()
        torch.ops.aten.view.default(self._leaf, [4])
        return self.stopwatch.now() - start

    def _of_nothing(self) -> float:
        with torch.enable_grad():
            return self._taken([self._leaf.view(4)], [self._leaf], [torch.ones(4, device="cpu")])

    def _taken(self, roots: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> float:
        start = self.stopwatch.now()
        torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
        return self.stopwatch.now() - start


def _read(given: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Read what was just computed, and so would be in the caches, unlike weights."""
    with torch.no_grad():
        for tensor, leaf in zip(given, leaves, strict=True):
            if isinstance(leaf, Given) and not leaf.kept:
                tensor.sum()


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested ``values``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
