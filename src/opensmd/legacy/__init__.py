"""``torch.distributed.deprecated`` revived: the distributed package of torch 1.0 on today's torch.

With opensmd installed, ``import torch.distributed.deprecated`` returns this module.

Begin with ``api``. Imports ``collectives``, ``native`` and ``environment``, and nothing from modelparallel.
"""

from typing import Any

from opensmd.import_aliases import install
from opensmd.legacy.api import (
    _INITIALIZED_MW,
    _INITIALIZED_PG,
    _clear_group_cache,
    _register_stream,
    all_gather,
    all_reduce,
    backend_in_use,
    barrier,
    broadcast,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    init_master_worker,
    init_process_group,
    irecv,
    is_available,
    is_initialized,
    isend,
    mode_in_use,
    new_group,
    recv,
    reduce,
    scatter,
    send,
)
from opensmd.legacy.groups import group
from opensmd.legacy.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
)
from opensmd.legacy.names import dist_backend, reduce_op

__all__ = [
    # the job
    "init_process_group",
    "init_master_worker",
    "destroy_process_group",
    "is_available",
    "is_initialized",
    "get_rank",
    "get_world_size",
    # groups and constants
    "new_group",
    "group",
    "reduce_op",
    "dist_backend",
    # messages
    "send",
    "recv",
    "isend",
    "irecv",
    # collectives
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "barrier",
    "broadcast_multigpu",
    "all_reduce_multigpu",
    "reduce_multigpu",
    "all_gather_multigpu",
    # private, but used by scripts, like _backend and _initialized
    "_clear_group_cache",
    "_register_stream",
    "_INITIALIZED_MW",
    "_INITIALIZED_PG",
]


def __getattr__(name: str) -> Any:
    """Return the old module's variables that changed with the job."""
    if name == "_backend":
        return backend_in_use()
    if name == "_initialized":
        return mode_in_use()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# If torch's loading of extensions is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), this installs them.
install()
