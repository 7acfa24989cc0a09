"""Collectives with gradients, for your own distributed modules."""

from opensmd.modelparallel.tensor_parallel.collectives import (
    from_partial,
    gather,
    gather_batch,
    own_slice,
    scatter_batch,
    sum_for_split,
    to_split,
)

__all__ = [
    "from_partial",
    "gather",
    "gather_batch",
    "own_slice",
    "scatter_batch",
    "sum_for_split",
    "to_split",
]
