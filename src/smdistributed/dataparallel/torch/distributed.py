"""The v1 functions; deprecated in favour of torch.distributed on the smddp backend."""

from opensmd.dataparallel.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
)

__all__ = [
    "ReduceOp",
    "group",
    "is_available",
    "init_process_group",
    "is_initialized",
    "get_world_size",
    "get_rank",
    "get_local_rank",
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_to_all_single",
    "barrier",
]
