"""The one group and the reductions of the v1 interface, and how they map to torch.distributed's."""

from __future__ import annotations

import enum
import os
from typing import Any

import torch.distributed as dist

from opensmd.collectives.locality import known_locality
from opensmd.collectives.mailbox import has_mailbox
from opensmd.dataparallel.exceptions import SMDDPError, SMDDPGroupError, SMDDPNotInitializedError
from opensmd.environment import variables

__all__ = ["ReduceOp", "check_group", "group", "local_rank", "require_initialized", "torch_op"]


class _Reductions(enum.EnumMeta):
    """Lists the available reductions when another one is requested."""

    def __getattr__(cls, name: str) -> Any:
        members = cls.__dict__.get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(f"ReduceOp has no {name}; the v1 interface has {', '.join(members)}")


class ReduceOp(enum.Enum, metaclass=_Reductions):
    """Reductions of :func:`all_reduce`. ``AVERAGE`` is torch's ``AVG``; there is no PRODUCT."""

    AVERAGE = "AVG"
    SUM = "SUM"
    MIN = "MIN"
    MAX = "MAX"


class _World:
    """The type of ``group.WORLD``: all ranks of the job."""

    def __repr__(self) -> str:
        return "group.WORLD"


class group:
    """The groups of the v1 interface: there is only ``group.WORLD``."""

    WORLD = _World()


def check_group(candidate: object, parameter: str = "group") -> None:
    """Accept ``group.WORLD`` (also torch's) and refuse everything else.

    Raises:
        SMDDPGroupError: another group was given.
    """
    if candidate is group.WORLD or (dist.is_initialized() and candidate is dist.group.WORLD):
        return
    raise SMDDPGroupError(
        f"{parameter}={candidate!r}: this interface knows only group.WORLD, all ranks of the job. For a part "
        "of the ranks use torch.distributed: make the group with torch.distributed.new_group and give it to "
        "torch.distributed's functions."
    )


def require_initialized(name: str) -> None:
    """Raise SMDDPNotInitializedError if there is no process group yet for ``name`` to use."""
    if not dist.is_initialized():
        raise SMDDPNotInitializedError(
            f"{name} was called before init_process_group(). Call "
            "smdistributed.dataparallel.torch.distributed.init_process_group() at the start of the script; "
            "in a local run, where is_available() is False, leave such calls out."
        )


def torch_op(op: ReduceOp | None) -> dist.ReduceOp.RedOpType:
    """Return torch.distributed's reduction for one of this interface; None means SUM.

    Raises:
        TypeError: ``op`` is not a :class:`ReduceOp`.
    """
    if op is None:
        return dist.ReduceOp.SUM
    if not isinstance(op, ReduceOp):
        names = ", ".join(f"ReduceOp.{operation.name}" for operation in ReduceOp)
        raise TypeError(f"op={op!r}: expected one of {names} of smdistributed.dataparallel.torch.distributed")
    reduction: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, op.value)
    return reduction


def local_rank() -> int:
    """Return this process's rank on its host, as found when the ranks met through this interface.

    After torch's own ``init_process_group``, it is LOCAL_RANK. A script that starts its ranks itself passes
    their ranks to that function without setting LOCAL_RANK; if all ranks share this host's memory, it is then
    the rank.

    Raises:
        SMDDPError: it is unknown.
    """
    known = known_locality()
    if known is not None:
        return known.rank
    value = os.environ.get("LOCAL_RANK")
    alone = dist.get_world_size() == 1
    if value is None or (not alone and variables.local_rank_is_assumed()):
        value = str(dist.get_rank()) if alone or has_mailbox() else None
    if value is None:
        raise SMDDPError(
            "the local rank is unknown: LOCAL_RANK is not set, and the ranks may run on several hosts. Start "
            "the script with smdrun, torchrun or mpirun, or set LOCAL_RANK to the process's number on its "
            "host."
        )
    return int(value)
