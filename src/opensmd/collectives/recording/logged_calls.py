"""Hands to the timeline the collectives that no record in shared memory holds, as the core has logged them.

Those are smddp's between hosts, and what torch's own Gloo and NCCL do.
"""

from __future__ import annotations

from collections.abc import Iterator

from opensmd.native import core
from opensmd.timeline.span import COLLECTIVES, MESSAGES, Span

__all__ = ["logged_calls", "name_of"]

# As torch.distributed calls what its operators and its NCCL have other names for.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
_MESSAGES = ("send", "recv", "recvanysource")


def logged_calls() -> Iterator[Span]:
    """What has ended since the last time; a source."""
    for group, operation, sequence, start, end, size in core.take_calls():
        name = name_of(operation)
        if name in _MESSAGES:
            yield Span(MESSAGES, name, start, end, bytes=size)
        else:
            yield Span(COLLECTIVES, name, start, end, call=f"{group}/{sequence}", bytes=size)


def name_of(operation: str) -> str:
    """The usual name of "smddp:all_reduce", "c10d::allreduce_" or NCCL's "ALLREDUCE"; pure."""
    short = operation.rpartition(":")[2].strip("_").lower()
    return _NAMES.get(short, short)
