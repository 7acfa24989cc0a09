"""A step without its script: the operations of a dry run once more, on real memory, and timed.

They get the model's own parameters, which are only read, and copies of all other tensors that the step began
with. Each gets what those before it have computed, so caches and allocator are as in a real step; and the
graph that they make is that of the step, so its backward runs as a whole.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from opensmd.modelparallel._torch_internals import without_modes
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock
from opensmd.modelparallel.dry_run.timing.step_record import StepRecord, TensorNumber
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch

__all__ = ["Replay"]

CALLS = 25  # to measure what a call costs


class Replay:
    """Runs the operations of a run again.

    Args:
        record: a complete one.
    """

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._operations = list(record.operations())
        self._watch = Stopwatch()

    def runs(self) -> Iterator[StepClock[float]]:
        """Run for each clock that is asked for; a clock counts every operation as a call."""
        while True:
            with _undisturbed():
                clock = self._run()
            yield clock

    def call_seconds(self) -> float:
        """Return what it takes to call an operation from here and to time that, beyond a call in a script."""
        value = torch.ones(4, device="cpu")
        with _undisturbed():
            here = self._usual(lambda: torch.ops.aten.view.default(value, [4]))
            in_script = self._usual(lambda: value.view(4)) - self._usual(lambda: value)
        return max(0.0, here - in_script)

    def _usual(self, call: Callable[[], Tensor]) -> float:
        taken = []
        for _ in range(CALLS):
            start = self._watch.now()
            call()
            taken.append(self._watch.now() - start)
        return statistics.median(taken)

    def _run(self) -> StepClock[float]:
        clock = StepClock(self._watch)
        values = {number: _had(tensor) for number, tensor in self._record.given.items()}
        trained = [each for each in values.values() if isinstance(each, nn.Parameter) and each.requires_grad]
        for operation, finished in self._operations:
            leaves = [
                values[each.number] if isinstance(each, TensorNumber) else each for each in operation.leaves
            ]
            args, kwargs = tree_unflatten(leaves, operation.structure)
            with torch.set_grad_enabled(operation.with_gradients):
                clock.begin(operation.unit)
                out = operation.func(*args, **kwargs)
                clock.rest()
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            values.update(zip(operation.results, made, strict=True))
            del args, kwargs, out, made  # a tensor lives no longer than in the step
            for number in finished:
                del values[number]
        losses = [values[number] for number in self._record.losses]
        values.clear()
        if losses and trained:
            gradients = [torch.ones_like(loss) for loss in losses]
            clock.backward_to(trained)(torch.autograd.backward, (losses, gradients), {})
        return clock


def _had(tensor: Tensor) -> Tensor:
    """Return a parameter with the same memory, or a copy of another tensor, without a graph."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Make operations run as they were recorded, and restore the state of random numbers."""
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng([]),
    ):
        yield
