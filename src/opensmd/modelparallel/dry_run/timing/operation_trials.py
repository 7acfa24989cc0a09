"""The times of a dry run's operations on this machine, each tried by itself on made-up data.

The times of convolutions vary more than rules based on shapes can say, while other operations keep to their
rates. So if convolutions are a substantial part of the work, every distinct operation of the run is tried a
few times, forward and backward. None of the script's code runs for that, and no more memory is needed than
for one operation. Trials cycle through all operations, so that caches are as cold as in a step; what the
previous operation would have left there is read first.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from opensmd.modelparallel._torch_internals import without_modes
from opensmd.modelparallel.dry_run.timing.clock import UnitSeconds
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch
from opensmd.modelparallel.planning.cost import OperationCost

__all__ = ["OperationTrials"]

# Of all estimated work: if convolutions are less, estimates are as good as measurements.
CONVOLUTIONS = 0.1
COUNTED = 3  # trials, after a warm-up
# An operation that takes this long in its trials is tried at most twice.
LONG_SECONDS = 20e-3
NOTHINGS = 25  # trials of doing nothing


class _Given(NamedTuple):
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


class _Operation(NamedTuple):
    """Identifies calls that take the same time."""

    func: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    structure: TreeSpec
    differentiated: bool

    @property
    def given(self) -> list[_Given]:
        """Its tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Given)]


class _Tried(NamedTuple):
    forward: float
    backward: float


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
    trials: list[_Tried] = field(default_factory=list)
    is_refused: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it need not be tried again."""
        if self.is_refused or len(self.trials) > COUNTED:
            return True
        return len(self.trials) > 1 and sum(map(sum, self.trials)) > LONG_SECONDS

    @property
    def seconds(self) -> _Tried:
        """The fastest of its trials, except the first."""
        return _Tried(*map(min, zip(*self.trials[1:], strict=True)))


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
        self._noted: dict[_Operation, _Noted] = {}
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
        operation = _Operation(func, described, structure, number is not None)
        if func.namespace != "aten" or not all(map(_can_be_made, leaves)):
            self._others.append((_Call(unit, number), estimate))
            return
        noted = self._noted.get(operation)
        if noted is None:
            needed = sum(each.span * each.dtype.itemsize for each in operation.given)
            needed += sum(leaf.numel() * leaf.element_size() for leaf in _tensors(out))
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

    def _described(self, tensor: Tensor) -> _Given:
        return _Given(
            tuple(tensor.shape),
            tuple(tensor.stride()) if tensor.layout is torch.strided else (),
            tensor.dtype,
            tensor.requires_grad,
            self._is_parameter(tensor),
        )

    def _try_all(self, most_bytes: float) -> None:
        for noted in self._noted.values():
            noted.is_refused = noted.bytes > most_bytes
        with _undisturbed():
            engine = _Engine()
            for _ in range(COUNTED + 1):
                for operation, noted in self._noted.items():
                    if noted.is_over:
                        continue
                    try:
                        noted.trials.append(_trial(operation, noted.estimate, engine))
                    except Exception:  # it does not accept the data, and counts as estimated
                        noted.trials.clear()
                        noted.is_refused = True

    def _pace(self, tried: Mapping[_Operation, _Tried]) -> float:
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


def _trial(operation: _Operation, estimate: OperationCost, engine: _Engine) -> _Tried:
    """Run an operation once, and its backward, if any."""
    made = [leaf.made() if isinstance(leaf, _Given) else leaf for leaf in operation.leaves]
    now = engine.stopwatch.now
    with torch.set_grad_enabled(operation.differentiated):
        # what is written in place must not be a leaf
        writes = operation.func._schema.is_mutable
        given = [leaf.clone() if writes and isinstance(leaf, Tensor) else leaf for leaf in made]
        _read(given, operation.leaves)
        args, kwargs = tree_unflatten(given, operation.structure)
        start = now()
        out = operation.func(*args, **kwargs)
        forward = max(0.0, now() - start - engine.to_call)
    if not operation.differentiated:
        return _Tried(forward, 0.0)
    roots = [leaf for leaf in _tensors(out) if leaf.requires_grad][:1]
    inputs = [leaf for leaf in made if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not (roots and inputs):  # inside a function with its own backward
        return _Tried(forward, forward * estimate.backward_seconds / estimate.forward_seconds)
    backward = engine.seconds(roots, inputs, [torch.ones_like(roots[0])])
    return _Tried(forward, backward)


class _Engine:
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


def _draws(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; fused attention does only with a nonzero dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _read(given: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Read what was just computed, and so would be in the caches, unlike weights."""
    with torch.no_grad():
        for tensor, leaf in zip(given, leaves, strict=True):
            if isinstance(leaf, _Given) and not leaf.kept:
                tensor.sum()


def _can_be_made(leaf: Any) -> bool:
    """Whether an argument can be made up; integers may be indices, which must be valid."""
    if isinstance(leaf, Tensor):
        return leaf.dtype.is_floating_point and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return not isinstance(leaf, torch.Generator | torch.UntypedStorage | torch.SymInt)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _at_pace(estimate: OperationCost, pace: float) -> _Tried:
    return _Tried(pace * estimate.forward_seconds, pace * estimate.backward_seconds)


def _both(estimate: OperationCost) -> float:
    return estimate.forward_seconds + estimate.backward_seconds
