"""Other ways to add up over smddp between hosts than its exact all_reduce: compressed, and over a tree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.hosts.operations import OPERATIONS, Buffers, Operation
from opensmd.collectives import _torch_internals
from opensmd.environment.settings import COMPRESSIONS

__all__ = ["EXACT", "TREE", "WAYS"]

TREE = "reduce and broadcast"
EXACT = next(operation for operation in OPERATIONS if operation.name == "all_reduce")


def _over_a_tree(b: Buffers, group: dist.ProcessGroup) -> None:
    dist.reduce(b.target, 0, group=group)
    dist.broadcast(b.target, 0, group=group)


def _compressed(compression: str) -> Operation:
    def call(b: Buffers, group: dist.ProcessGroup) -> None:
        backend = _torch_internals.cpu_backend(group)
        backend.all_reduce_compressed(b.target, average=False, compression=compression, residual=None).wait()

    def near(b: Buffers) -> bool:
        sums = b.sums()
        return torch.allclose(b.target, sums, rtol=0, atol=float(sums.max()) / 50)

    return Operation(EXACT.name, call, near, EXACT.crosses)


WAYS = {
    TREE: Operation(EXACT.name, _over_a_tree, EXACT.right, EXACT.crosses),
    **{compression: _compressed(compression) for compression in COMPRESSIONS},
}
