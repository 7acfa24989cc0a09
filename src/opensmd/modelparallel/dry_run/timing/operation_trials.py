"""The times of a dry run's operations on this machine, each tried by itself on made-up data.

The times of convolutions vary more than rules based on shapes can say, while other operations keep to their
rates. So if convolutions are a substantial part of the work, every distinct operation of the run is tried a
few times, forward and backward. None of the script's code runs for that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from opensmd.modelparallel._torch_internals import without_modes
from opensmd.modelparallel.dry_run.timing.clock import UnitSeconds
from opensmd.modelparallel.dry_run.timing.trial import (
    BackwardTimer,
    Given,
    Trial,
    Tried,
    TriedOperation,
    tensors_in,
)
from opensmd.modelparallel.planning.costs.cost import OperationCost

__all__ = ["OperationTrials"]

# Of all estimated work: if convolutions are less, estimates are as good as measurements.
CONVOLUTIONS = 0.1
COUNTED = 3  # trials, after a warm-up
# An operation that takes this long in its trials is tried at most twice.
LONG_SECONDS = 20e-3


class _Call(NamedTuple):
    """A call in ``unit``; ``number`` tells whether it has a backward, and is None without gradients."""

    unit: int
    number: int | None


@dataclass
class _Noted:
    """An operation with its estimates, where it is called, and what a trial needs."""

    estimate: OperationCost
    bytes: int
    calls: list[_Call] = field(default_factory=list)
    trials: list[Tried] = field(default_factory=list)
    is_refused: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it need not be tried again."""
        if self.is_refused or len(self.trials) > COUNTED:
            return True
        return len(self.trials) > 1 and sum(map(sum, self.trials)) > LONG_SECONDS

    @property
    def seconds(self) -> Tried:
        """The fastest of its trials, except the first."""
        return Tried(*map(min, zip(*self.trials[1:], strict=True)))


class OperationTrials:
    """The operations of one run.

    Args:
        is_parameter: whether a tensor is a parameter, or a view of one.
        has_backward: whether the differentiated call of this number has a backward; asked after the run.

    Attributes:
        draws: whether random numbers were drawn, so that results depend on where modules are.
    """

    def __init__(self, is_parameter: Callable[[Tensor], bool], has_backward: Callable[[int], bool]) -> None:
        self.draws = False
        self._is_parameter = is_parameter
        self._has_backward = has_backward
        self._noted: dict[TriedOperation, _Noted] = {}
        self._others: list[tuple[_Call, OperationCost]] = []  # those that cannot be tried

    def note(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        unit: int,
        estimate: OperationCost,
        number: int | None,
    ) -> None:
        """Note an operation in ``unit``, with its ``number`` if it is differentiated."""
        self.draws = self.draws or _draws(func, args, kwargs)
        if not estimate.forward_seconds:
            return
        leaves, structure = tree_flatten((args, kwargs))
        described = tuple(self._described(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        operation = TriedOperation(func, described, structure, number is not None)
        if func.namespace != "aten" or not all(map(_can_be_made, leaves)):
            self._others.append((_Call(unit, number), estimate))
            return
        noted = self._noted.get(operation)
        if noted is None:
            needed = sum(each.span * each.dtype.itemsize for each in operation.given)
            needed += sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(out))
            noted = self._noted[operation] = _Noted(estimate, 2 * needed)
        noted.calls.append(_Call(unit, number))

    @property
    def are_needed(self) -> bool:
        """Whether estimates cannot be trusted, because convolutions are much of the work."""
        work = convolutions = 0.0
        for operation, noted in self._noted.items():
            seconds = len(noted.calls) * _both(noted.estimate)
            work += seconds
            convolutions += seconds if operation.func.overloadpacket is torch.ops.aten.convolution else 0.0
        work += sum(_both(estimate) for _, estimate in self._others)
        return convolutions > CONVOLUTIONS * work

    def seconds(self, most_bytes: float) -> UnitSeconds | None:
        """Try all that need at most ``most_bytes``; others count as estimated, at this machine's pace.

        Returns:
            Nothing if no operation could be tried.
        """
        self._try_all(most_bytes)
        tried = {operation: noted.seconds for operation, noted in self._noted.items() if noted.trials[1:]}
        if not tried:
            return None
        pace = self._pace(tried)
        forward: dict[int, float] = defaultdict(float)
        backward: dict[int, float] = defaultdict(float)
        taken = [(call, _at_pace(estimate, pace)) for call, estimate in self._others]
        for operation, noted in self._noted.items():
            found = tried.get(operation) or _at_pace(noted.estimate, pace)
            taken += [(call, found) for call in noted.calls]
        for (unit, number), seconds in taken:
            forward[unit] += seconds.forward
            if number is not None and self._has_backward(number):
                backward[unit] += seconds.backward
        return UnitSeconds(forward, backward)

    def _described(self, tensor: Tensor) -> Given:
        return Given(
            tuple(tensor.shape),
            tuple(tensor.stride()) if tensor.layout is torch.strided else (),
            tensor.dtype,
            tensor.requires_grad,
            self._is_parameter(tensor),
        )

    def _try_all(self, most_bytes: float) -> None:
        for noted in self._noted.values():
            noted.is_refused = noted.bytes > most_bytes
        waiting = [each for each in self._noted.items() if not each[1].is_refused]
        with _undisturbed():
            engine = BackwardTimer()
            while waiting:
                taken = _as_many_as_fit(waiting, most_bytes)
                _try_together(dict(waiting[:taken]), engine)
                waiting = waiting[taken:]

    def _pace(self, tried: Mapping[TriedOperation, Tried]) -> float:
        """Return how long this machine takes for one estimated second."""
        taken = estimated = 0.0
        for operation, seconds in tried.items():
            noted = self._noted[operation]
            calls = len(noted.calls)
            taken += calls * sum(seconds)
            estimated += calls * _both(noted.estimate)
        return taken / estimated


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Make operations run as given, and restore the state of random numbers."""
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng([]),
    ):
        yield


def _as_many_as_fit(waiting: Sequence[tuple[TriedOperation, _Noted]], most_bytes: float) -> int:
    """Return how many of the first need at most ``most_bytes`` together; each does by itself."""
    needed = itertools.accumulate(noted.bytes for _, noted in waiting)
    return sum(1 for _ in itertools.takewhile(lambda size: size <= most_bytes, needed))


def _try_together(operations: Mapping[TriedOperation, _Noted], engine: BackwardTimer) -> None:
    """Try operations in rounds of all forwards and then all backwards."""
    trials: dict[TriedOperation, Trial] = {}
    for operation, noted in operations.items():
        with _refusing(noted):
            estimate = noted.estimate
            trials[operation] = Trial(operation, estimate.backward_seconds / estimate.forward_seconds)
    for _ in range(COUNTED + 1):
        waiting = [
            (trial, operations[each]) for each, trial in trials.items() if not operations[each].is_over
        ]
        for trial, noted in waiting:
            with _refusing(noted):
                trial.forward(engine)
        for trial, noted in reversed(waiting):
            if not noted.is_refused:
                with _refusing(noted):
                    noted.trials.append(trial.backward(engine))


@contextlib.contextmanager
def _refusing(noted: _Noted) -> Iterator[None]:
    """Let an operation that does not accept the data count as estimated."""
    try:
        yield
    except Exception:
        noted.trials.clear()
        noted.is_refused = True


def _draws(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; fused attention does only with a nonzero dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _can_be_made(leaf: Any) -> bool:
    """Whether an argument can be made up; integers may be indices, which must be valid."""
    if isinstance(leaf, Tensor):
        return leaf.dtype.is_floating_point and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return not isinstance(leaf, torch.Generator | torch.UntypedStorage | torch.SymInt)


def _at_pace(estimate: OperationCost, pace: float) -> Tried:
    return Tried(pace * estimate.forward_seconds, pace * estimate.backward_seconds)


def _both(estimate: OperationCost) -> float:
    return estimate.forward_seconds + estimate.backward_seconds
