"""Detecting work that estimates from shapes miss, as far as the dry run can suspect it.

Under fake tensors, a custom operation computes nothing, an extension's kernel looks like any other call, and
sleeping or looping in Python is not an operation at all. There are two signs: functions and operations that
are not torch's own, and time that passes between operations. If there is such a sign, the step is timed for
real (see :mod:`..measuring`), and the measurement counts if it is far off the estimate.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from opensmd.modelparallel.redirection._torch_internals import replaced_functions

__all__ = ["UnseenWork", "outweighs"]

# Torch's own overhead and the model's Python take this much between two operations, even on a busy machine.
BETWEEN_OPERATIONS = 0.3e-3
# Less than this, and less than this share of all estimated work, does not matter for a split.
LEAST_SECONDS = 2e-3
LEAST_SHARE = 0.05
# How far a measurement must be from an estimate to count, because machines differ in speed and load.
TIMES_ESTIMATE = 3.0

_OF_TORCH = frozenset({"aten", "prims", "prim", "_c10d_functional", "mkldnn", "quantized", "profiler"})


class UnseenWork:
    """Watches for signs of it in a run.

    Args:
        unit: returns the current unit of the run.
        now: a clock.

    Attributes:
        differentiates: whether an autograd function with gradients is running. Torch sees none of the
            operations in it as differentiable.
        in_function: whether an autograd function runs that is not torch's own.
    """

    def __init__(self, unit: Callable[[], int], now: Callable[[], float]) -> None:
        self.differentiates = False
        self.in_function = False
        self._unit = unit
        self._now = now
        self._suspected: set[int] = set()
        self._operations: dict[int, int] = defaultdict(int)
        self._in_operations: dict[int, float] = defaultdict(float)

    def operation(self, func: torch._ops.OpOverload, unit: int, since: float) -> None:
        """Note that an operation of ``unit``, which came at ``since``, has been processed."""
        self._operations[unit] += 1
        if func.namespace not in _OF_TORCH and func.overloadpacket not in flop_registry:
            self._suspected.add(unit)
        self._in_operations[unit] += self._now() - since

    def looked_on(self, unit: int, since: float) -> None:
        """Note that watching ``unit`` has taken the time since ``since``."""
        self._in_operations[unit] += self._now() - since

    @contextlib.contextmanager
    def watching_functions(self) -> Iterator[None]:
        """Detect calls of ``torch.autograd.Function``, which dispatch modes do not see."""

        def apply(original: Any, function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            around = self.differentiates, self.in_function
            if not function.__module__.startswith("torch."):
                self._suspected.add(self._unit())
                self.in_function = True
            self.differentiates = self.differentiates or (
                torch.is_grad_enabled()
                and any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
            )
            try:
                return original(*args, **kwargs)
            finally:
                self.differentiates, self.in_function = around

        with replaced_functions(
            apply=apply,
            script=lambda original, function, args, kwargs: original(*args, **kwargs),
            checkpoint=lambda original, args, kwargs: original(*args, **kwargs),
        ):
            yield

    def units(self, passed: Mapping[int, float], estimated: Mapping[int, float]) -> set[int]:
        """Return the units whose estimates may be wrong.

        Args:
            passed: seconds of this run, by unit.
            estimated: their estimated forward seconds.
        """
        least = max(LEAST_SECONDS, LEAST_SHARE * sum(estimated.values()))
        slow = {
            unit
            for unit, seconds in passed.items()
            if seconds - self._in_operations[unit] - BETWEEN_OPERATIONS * (self._operations[unit] + 1) > least
        }
        return {unit for unit in slow | self._suspected if unit >= 0}


def outweighs(measured: float, estimated: float) -> bool:
    """Whether a unit's measured seconds show that its estimate has missed something."""
    return measured > TIMES_ESTIMATE * estimated + LEAST_SECONDS / 2
