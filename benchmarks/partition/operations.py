"""``python -m benchmarks.partition.operations``: what each kind of operation takes, beside the table.

An operation's input has just been written, as by the operation before it. Backward begins when all forwards
are over, so that what it needs has left the nearer caches, as in a step. The least of several rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.partition.kept_memory import with_kept_memory
from benchmarks.partition.operation_cases import CASES, Case
from opensmd.modelparallel.planning.costs.cost import cost_of

FORWARDS = 8  # before the first backward


class Estimate(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Sums what the table says of the operations that run in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0.0
        self.backward = 0.0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        named = kwargs if isinstance(kwargs, dict) else {}
        wanted = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, named)))
        out = func(*args, **named)
        cost = cost_of(func, args, named, out, needs_gradient=wanted)
        self.forward += cost.forward_seconds
        self.backward += cost.backward_seconds
        return out


@dataclass(frozen=True)
class Row:
    """Seconds of an operation."""

    case: Case
    forward: float
    backward: float
    estimate: Estimate


def measure(case: Case, seconds: float) -> Row:
    """The operation for ``seconds``, at least three times."""
    torch.manual_seed(0)
    operation, given = case.make()
    estimate = Estimate()
    with estimate:
        operation(*given)
    rounds = list(_rounds(operation, given, seconds))
    forwards, backwards = zip(*rounds, strict=True)
    return Row(case, min(forwards), max(0.0, min(backwards) - engine_seconds()), estimate)


def _rounds(
    operation: Callable[..., Tensor], given: Sequence[Tensor], seconds: float
) -> Iterator[tuple[float, float]]:
    parameters = list(operation.parameters()) if isinstance(operation, nn.Module) else []
    end, count = time.monotonic() + seconds, 0
    while count < 3 or time.monotonic() < end:
        count += 1
        forward = backward = 0.0
        results = []
        for _ in range(FORWARDS):
            fresh = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
            inputs = [one.view_as(one) if one.requires_grad else one for one in fresh]  # no leaves
            begin = time.perf_counter()
            results.append(operation(*inputs))
            forward += time.perf_counter() - begin
        while results:
            result = results.pop()
            gradient = torch.full_like(result, 1.0)
            for parameter in parameters:
                parameter.grad = None
            begin = time.perf_counter()
            torch.autograd.backward(result, gradient)
            backward += time.perf_counter() - begin
        yield forward / FORWARDS, backward / FORWARDS


def engine_seconds() -> float:
    """What a backward takes in which nothing is computed."""
    samples = []
    for _ in range(30):
        result = torch.ones(4, requires_grad=True).view(2, 2)
        gradient = torch.ones(2, 2)
        begin = time.perf_counter()
        torch.autograd.backward(result, gradient)
        samples.append(time.perf_counter() - begin)
    return min(samples)


def main() -> None:
    """Measure the kinds that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="parts of their names; all by default")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each operation")
    options = parser.parse_args()
    with_kept_memory("benchmarks.partition.operations")
    torch.set_num_threads(1)
    asked = [case for case in CASES if not options.kinds or any(part in case.name for part in options.kinds)]
    _show([measure(case, options.seconds) for case in asked])


def _show(rows: Sequence[Row]) -> None:
    table = Table(title="microseconds of one core")
    for heading in (
        "operation",
        "forward",
        "table",
        "measured / table",
        "backward",
        "table",
        "measured / table",
    ):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row.case.name,
            *_cells(row.forward, row.estimate.forward),
            *_cells(row.backward, row.estimate.backward),
        )
    console = Console(width=140)
    console.print(table)
    for what in ("forward", "backward"):
        factors = [getattr(row, what) / (getattr(row.estimate, what) or 1.0) for row in rows]
        middle = statistics.median(factors)
        near = sum(0.5 < factor / middle < 2 for factor in factors)
        console.print(
            f"{what}: {near} of {len(rows)} within a factor of 2 of the median measured / table, {middle:.2f}"
        )


def _cells(measured: float, estimated: float) -> tuple[str, str, str]:
    factor = f"{measured / estimated:.2f}" if estimated else "-"
    return f"{measured * 1e6:.1f}", f"{estimated * 1e6:.1f}", factor


if __name__ == "__main__":
    main()
