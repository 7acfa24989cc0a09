"""``smdistributed.dataparallel.torch.distributed``: the v1 functions, on top of torch.distributed.

They share torch's default process group, so both interfaces may be mixed in one script. Before
``init_process_group()``, every call on the group raises SMDDPNotInitializedError, and for another group than
``group.WORLD`` SMDDPGroupError.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from opensmd.collectives import backend, locality
from opensmd.dataparallel import BACKEND, world
from opensmd.dataparallel.deprecation import warn_deprecated
from opensmd.dataparallel.world import ReduceOp, check_group, group, require_initialized, torch_op
from opensmd.environment import variables

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

_PATH = "smdistributed.dataparallel.torch.distributed"


def is_available() -> bool:
    """Return True if a launcher started this process as a rank of a job; False in a plain local run.

    A local script can then skip every other call of the library. This may be called before
    :func:`init_process_group`, which does not change the result.
    """
    _deprecated("is_available", "torch.distributed.is_torchelastic_launched()")
    return variables.current_launch() is not None


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Create the group of all ranks, which every other call needs; in a plain local run, a group of one.

    The arguments are those of torch: ``init_method``, ``timeout``, ``world_size``, ``rank``, ``store``,
    ``group_name`` and ``pg_options`` mean the same as in ``torch.distributed.init_process_group``. The
    backend is always smddp.

    Raises:
        SMDDPGroupError: ``group`` or ``process_group`` is not ``group.WORLD``.
        ValueError: a rank's LOCAL_RANK does not fit the hosts on which the ranks met.

    Warns:
        UserWarning: another backend was requested.
    """
    _deprecated("init_process_group")
    for parameter in ("group", "process_group"):
        if parameter in kwargs:
            check_group(kwargs.pop(parameter), parameter)
    wanted = kwargs.pop("backend", None)
    if args and isinstance(args[0], type(group.WORLD)):
        args = args[1:]
    elif args and wanted is None:
        wanted, args = args[0], args[1:]
    if wanted not in (None, BACKEND):
        warnings.warn(f"the backend {wanted!r} is ignored; the group uses {BACKEND!r}", stacklevel=2)
    variables.fill()
    backend.register()
    dist.init_process_group(BACKEND, *args, **kwargs)
    locality.meet()
    atexit.register(_leave, os.getpid())


def is_initialized() -> bool:
    """Return True once :func:`init_process_group` has created the group."""
    _deprecated("is_initialized")
    return dist.is_initialized()


def get_world_size(group: object = group.WORLD) -> int:
    """Return the number of ranks of the job, on all hosts."""
    _before("get_world_size", group)
    return dist.get_world_size()


def get_rank(group: object = group.WORLD) -> int:
    """Return this process's rank in the job, from 0 to ``get_world_size() - 1``.

    The original's documentation calls it the rank of the node, but its examples use it as the rank of the
    process, which this follows.
    """
    _before("get_rank", group)
    return dist.get_rank()


def get_local_rank() -> int:
    """Return this process's rank on its host, from 0."""
    _deprecated("get_local_rank", "the environment variable LOCAL_RANK")
    require_initialized("get_local_rank")
    return world.local_rank()


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce ``tensor`` over all ranks, in place, with the same bits everywhere; ``op=None`` is SUM.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.
    """
    _before("all_reduce", group)
    work: dist.Work | None = dist.all_reduce(tensor, op=torch_op(op), async_op=async_op)
    return work


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: object = group.WORLD, async_op: bool = False
) -> dist.Work | None:
    """Copy ``tensor`` from rank ``src`` to every rank's ``tensor`` of the same size.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.
    """
    _before("broadcast", group)
    work: dist.Work | None = dist.broadcast(tensor, src, async_op=async_op)
    return work


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather every rank's ``tensor`` into ``tensor_list``, which has one tensor of the right size per rank.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.
    """
    _before("all_gather", group)
    work: dist.Work | None = dist.all_gather(tensor_list, tensor, async_op=async_op)
    return work


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: object = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Send each rank its piece of ``input_t`` along axis 0; join the received ones in ``output_t``, by rank.

    Without split sizes, the pieces are equal, and the number of ranks must divide the axis.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.
    """
    _before("all_to_all_single", group)
    work: dist.Work | None = dist.all_to_all_single(
        output_t, input_t, _listed(output_split_sizes), _listed(input_split_sizes), async_op=async_op
    )
    return work


def barrier(group: object = group.WORLD, async_op: bool = False) -> dist.Work | None:
    """Wait until every rank has called this.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.
    """
    _before("barrier", group)
    work: dist.Work | None = dist.barrier(async_op=async_op)
    return work


def _leave(member: int) -> None:
    """Destroy the group when the process ends, because this interface has no call for it.

    Not after a failure, nor in a forked child of the ``member``.
    """
    if os.getpid() == member and dist.is_initialized() and getattr(sys, "last_type", None) is None:
        dist.destroy_process_group()


def _deprecated(name: str, replacement: str | None = None, *, stacklevel: int = 4) -> None:
    warn_deprecated(f"{_PATH}.{name}", replacement or f"torch.distributed.{name}", stacklevel=stacklevel)


def _before(name: str, group: object) -> None:
    """Do the checks that every call on the group starts with."""
    _deprecated(name, stacklevel=5)
    require_initialized(name)
    check_group(group)


def _listed(sizes: Sequence[int] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)
