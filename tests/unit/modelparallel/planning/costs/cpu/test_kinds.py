"""What an operation is to the table of rates: its kind, and what counts as its elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.planning.costs.cpu.kinds import Counted, counted


class Counting(TorchDispatchMode):
    """Counts the operations that run in it, but those that write nothing: views, and empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Counted] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of each operation."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            result = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.found.append(counted(func.overloadpacket, args, kwargs or {}, tensors, result))
        return out


X = torch.ones(4, 6)
IMAGES = torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("run", "kind", "elements"),
    [
        (lambda: X + 1, "arithmetic", 24),
        (lambda: X.sum(), "mean", 24),
        (lambda: torch.tanh(X), "tangent", 24),
        (lambda: torch.nn.functional.gelu(X), "exponential", 24),
        (lambda: torch.nn.functional.gelu(X, approximate="tanh"), "GELU by tangent", 24),
        (lambda: torch.softmax(X, 1), "softmax", 24),
        (lambda: X.t().contiguous(), "transposed copy", 24),
        (lambda: X.clone(), "arithmetic", 24),
        (lambda: torch.nn.functional.max_pool2d(IMAGES, 2), "maximum of windows", 2 * 3 * 4 * 4 * 4),
        (lambda: torch.nn.functional.avg_pool2d(IMAGES, (2, 4)), "mean of windows", 2 * 3 * 4 * 2 * 8),
        (lambda: torch.nn.functional.batch_norm(IMAGES, X[0, :3], X[0, :3]), "fixed batch norm", 384),
        (
            lambda: torch.nn.functional.batch_norm(IMAGES, X[0, :3], X[0, :3], training=True),
            "batch norm",
            384,
        ),
    ],
)
def test_operations_are_of_the_kind_that_their_loop_is(run: Any, kind: str, elements: int) -> None:
    with torch.no_grad(), Counting() as counting:
        run()
    assert [(found.kind, found.elements) for found in counting.found] == [(kind, elements)]


def test_a_layer_norm_counts_its_rows() -> None:
    with torch.no_grad(), Counting() as counting:
        torch.ops.aten.native_layer_norm(torch.ones(4, 5, 6), (5, 6), None, None, 1e-5)
    found = counting.found[-1]
    assert (found.kind, found.elements, found.rows) == ("layer norm", 120, 4)


def test_a_lookup_reads_its_rows_alone_and_clears_the_whole_table_backward() -> None:
    table = torch.ones(1000, 6)
    with torch.no_grad(), Counting() as counting:
        torch.nn.functional.embedding(torch.tensor([1, 2]), table)
    (found,) = counting.found
    assert (found.elements, found.reads_all, found.backward_bytes) == (12, False, table.nbytes)


def test_the_copy_of_a_number_is_arithmetic() -> None:
    aten, result = torch.ops.aten, torch.empty((), device="meta")
    assert counted(aten._to_copy, (2,), {"dtype": torch.float32}, [], result).kind == "arithmetic"
