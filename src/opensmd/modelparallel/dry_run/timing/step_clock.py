"""The time of every unit of a model in a real step, forward and backward.

In forward, modules show where the run is. In backward, every node of the autograd graph belongs to the unit
in which it was created, which its sequence number shows; a gradient accumulator belongs to the unit of the
node before it. Only the nodes at which a unit's backward begins are watched. Watching itself takes time, much
compared to small operations; what of it is not left out is measured per call and per node, and subtracted.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.dry_run._torch_internals import made_by, number_of_next_node
from opensmd.modelparallel.dry_run.timing.clock import Clock, Moment, Timepiece, UnitSeconds
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch

__all__ = ["StepClock", "Watching", "losses_in", "watching_seconds"]

# The number of calls and nodes watched to measure that cost, how often, and what each computes: with caches
# that are as warm as between modules that do nothing, watching would take half as long as in a step.
_WATCHED = 64
_ROUNDS = 9
_ELEMENTS = 1 << 15

# By how much longer it takes to watch a call in a model, whose own code leaves the caches in between.
_IN_A_MODEL = 1.5


class Watching(NamedTuple):
    """The cost of watching the call of a module, and the backward of a node."""

    call: float
    node: float


class StepClock(Clock[Moment]):
    """Follows one step forward and backward.

    Attributes:
        calls_of: the number of calls started in each unit.
        nodes_of: the number of watched nodes whose backward ran, by unit.
        went_backward: whether there was a backward.
    """

    def __init__(self, watch: Timepiece[Moment]) -> None:
        super().__init__(watch)
        self.calls_of: dict[int, int] = defaultdict(int)
        self.nodes_of: dict[int, int] = defaultdict(int)
        self.went_backward = False
        self._backward_stretches: list[tuple[int, Moment, Moment]] = []
        self._numbers = [0]  # the first sequence number from which on ...
        self._units = [-1]  # ... this unit creates the nodes

    def _tick(self) -> None:
        super()._tick()
        self._numbers.append(number_of_next_node())
        self._units.append(self.current)

    def enter(self, module: str) -> None:
        super().enter(module)
        self._begun()

    def begin(self, unit: int) -> None:
        """Note that a call in ``unit`` begins, which ends with :meth:`rest`."""
        self._tick()
        self.current = unit
        self._begun()

    def _begun(self) -> None:
        self.calls_of[self.current] += 1
        self._units[-1] = self.current
        self._since = self.watch.now()

    @property
    def backward(self) -> dict[int, float]:
        """Backward seconds by unit."""
        return self._sums(self._backward_stretches)

    @property
    def all_seconds(self) -> float:
        """The seconds of all units, forward and backward."""
        return sum(self.seconds.values()) + sum(self.backward.values())

    def rest(self) -> None:
        """Note that what follows is no part of the step, but for backwards and what :meth:`begin` says."""
        self._tick()
        self.current = -1

    def run_backward(
        self,
        plain: Callable[..., None],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """Run ``plain(*args, **kwargs)``, a backward within the step or at its end.

        Args:
            around: a context for it, whose own time does not count.
        """
        self._tick()
        position, self.current, self.went_backward = self.current, -1, True
        roots = tree_leaves(args[0] if args else kwargs["tensors"])
        handles = [
            node.register_prehook(lambda _, unit=unit: self._goes_on(unit))
            for node, unit in self._borders(roots)
        ]
        try:
            with around or contextlib.nullcontext():
                plain(*args, **kwargs)
                self._goes_on(-1)
        finally:
            for handle in handles:
                handle.remove()
            self.current, self._since = position, self.watch.now()

    def backward_of(self, module: nn.Module) -> Callable[..., None]:
        """Like :meth:`run_backward`, but only for the parameters of ``module``, which keep no gradients."""
        return self.backward_to([parameter for parameter in module.parameters() if parameter.requires_grad])

    def backward_to(self, trained: Sequence[nn.Parameter]) -> Callable[..., None]:
        """Like :meth:`backward_of`, for the parameters ``trained``."""

        def run(plain: Callable[..., None], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            self.run_backward(plain, args, {"inputs": trained, **kwargs}, _gradients_dropped(trained))

        return run

    def taken(self, watching: Watching) -> UnitSeconds:
        """Return the seconds of each unit minus those for ``watching``; without backward if none ran."""
        forward = _less(self.seconds, self.calls_of, watching.call)
        if not self.went_backward:
            return UnitSeconds(forward, None)
        return UnitSeconds(forward, _less(self.backward, self.nodes_of, watching.node), with_sums=True)

    def _goes_on(self, unit: int) -> None:
        now = self.watch.now()
        if self.current >= 0:
            self._backward_stretches.append((self.current, self._since, now))
            self.nodes_of[self.current] += 1
        self.current, self._since = unit, now

    def _borders(self, roots: Sequence[Tensor]) -> Iterator[tuple[torch.autograd.graph.Node, int]]:
        """Yield the nodes with which the backward of another unit begins.

        Of the nodes that are ready, torch's engine runs the one that was created last, and accumulators at
        once.
        """
        unit_of = self._nodes(roots)
        numbered = [(made_by(node), node) for node in unit_of]
        before: int | None = None
        for _, node in sorted(
            ((number, node) for number, node in numbered if number is not None),
            key=itemgetter(0),
            reverse=True,
        ):
            if unit_of[node] != before:
                yield node, unit_of[node]
            before = unit_of[node]

    def _nodes(self, roots: Sequence[Tensor]) -> dict[torch.autograd.graph.Node, int]:
        found: dict[torch.autograd.graph.Node, int] = {}
        waiting = [(root.grad_fn, -1) for root in roots]
        while waiting:
            node, before = waiting.pop()
            if node is None or node in found:
                continue
            number = made_by(node)
            unit = before if number is None else self._maker_of(number)
            found[node] = unit
            waiting.extend((following, unit) for following, _ in node.next_functions)
        return found

    def _maker_of(self, number: int) -> int:
        return self._units[bisect.bisect_right(self._numbers, number) - 1]


def losses_in(result: Any) -> Sequence[Tensor]:
    """Return what a step's caller may run backward from: its loss, or the first of several."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [leaf for leaf in leaves if leaf.numel() == 1][:1]


@contextlib.contextmanager
def _gradients_dropped(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Drop each gradient as soon as a backward produces it, so that memory for one is enough."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _less(seconds: Mapping[int, float], counts: Mapping[int, int], each: float) -> dict[int, float]:
    return {unit: max(0.0, taken - each * counts.get(unit, 0)) for unit, taken in seconds.items()}


@torch.inference_mode(False)
@torch.enable_grad()  # whatever the mode of the timed step
def watching_seconds() -> Watching:
    """Measure by how much a chain of small operations takes longer if it is watched."""
    chain = nn.Sequential(*[_Negation() for _ in range(_WATCHED)])
    names = {module: name for name, module in chain.named_modules()}
    value = torch.ones(_ELEMENTS, device="cpu", requires_grad=True)
    watch = Stopwatch()
    forwards, backwards = [], []
    for _ in range(_ROUNDS):
        clock = StepClock(watch)
        with clock.follow(names):
            clock.run_backward(torch.autograd.backward, [chain(value), value], {})
        start = watch.now()
        result = chain(value)
        between = watch.now()
        torch.autograd.backward([result], [value])
        forwards.append(sum(clock.seconds.values()) - (between - start))
        backwards.append(sum(clock.backward.values()) - (watch.now() - between))
    forward, backward = statistics.median(forwards), statistics.median(backwards)
    calls, nodes = sum(clock.calls_of.values()), sum(clock.nodes_of.values())
    return Watching(_IN_A_MODEL * max(0.0, forward) / calls, max(0.0, backward) / nodes)


class _Negation(nn.Module):
    """Computes little."""

    def forward(self, value: Tensor) -> Tensor:
        return -value
