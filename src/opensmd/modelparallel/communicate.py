"""Objects between ranks: ``smp.broadcast``, ``send``, ``recv_from``, ``allgather`` and barriers.

Any picklable object can be sent. Objects have a process group of their own, so they are never mixed up with
the script's tensors. A send returns when the receiver has the object; the receipt is a number that cannot be
an object's length. As documented, only the sender calls ``broadcast``; every other member of the group calls
``recv_from``.

With several partitions, a step function may not do any of this: rank 0 runs it once more than the others, for
its plan, and every rank takes microbatches in its own order. Ranks that wait for each other inside a step
would wait until the timeout, or meet in different microbatches. So every call that ranks make together is
refused there, with SMPError.

Before ``smp.init`` all of these raise SMPNotInitializedError, and for a group that is no ``smp.CommGroup``
TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError

from opensmd.modelparallel.dry_run.dry import is_tracing
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup, RankType
from opensmd.modelparallel.ranks.meeting import meet
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.state import state

__all__ = [
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "meet_for",
    "meet_sharing_tensors",
    "mp_barrier",
    "recv_from",
    "require_meeting",
    "send",
]

RECEIVED = -1
_OF_REPLICA = (CommGroup.PP_GROUP, CommGroup.TP_GROUP)

Result = TypeVar("Result")


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send ``obj`` to every other rank of the caller's ``group``; return when all have it.

    Called by the sender only; each other member calls :func:`recv_from` with the sender's rank.

    Raises:
        SMPError: another member is sending to this rank.
    """
    kind = _group(group, "smp.broadcast")
    others = [rank for rank in state.groups.members(kind) if rank != state.rank]
    for rank in others:
        _post(obj, rank)
    for rank in others:
        _await_receipt(rank, "smp.broadcast")


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send ``obj`` to a rank, numbered within the caller's group of ``rank_type``; return when it has it.

    Raises:
        ValueError: there is no such rank, or it is the caller's own.
        SMPError: that rank is sending to this one.
    """
    peer = _peer(dest_rank, rank_type, "smp.send")
    _post(obj, peer)
    _await_receipt(peer, "smp.send")


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive what ``src_rank``, numbered within the caller's group of ``rank_type``, sent or broadcast.

    Raises:
        ValueError: there is no such rank, or it is the caller's own.
    """
    peer = _peer(src_rank, rank_type, "smp.recv_from")
    received: list[Any] = [None]
    dist.recv_object_list(received, src=peer, group=state.groups.messages)
    dist.send(_receipt(), dst=peer, group=state.groups.messages)
    return received[0]


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Return the objects of all ranks of the caller's ``group``, in rank order; all of them must call."""
    kind = _group(group, "smp.allgather")

    return _over_replicas(kind, lambda: exchange(obj, state.groups[kind]), "smp.allgather")


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until every rank of the caller's ``group`` has called this.

    Raises:
        SMPError: others have called something else.
    """
    name = "smp.barrier"
    kind = _group(group, name)
    # Of a replica, whose ranks may have called what they do together in a smaller group.
    inside = _OF_REPLICA if kind in (CommGroup.WORLD, CommGroup.MP_GROUP) else ()
    _over_replicas(kind, lambda: _meet(name, [state.groups[each] for each in (*inside, kind)]), name)


def mp_barrier() -> None:
    """Wait for the ranks of this model replica."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Wait for the replicas of this partition."""
    barrier(CommGroup.DP_GROUP)


def _over_replicas(kind: CommGroup, work: Callable[[], Result], name: str) -> Result:
    """Return what ``work`` returns; in an elastic job, the remaining replicas do it for the whole world."""
    if state.elastic is None or kind is not CommGroup.WORLD:
        return work()
    done: Result = state.elastic.carry_out(work, name, alone=True)
    return done


def _group(group: object, name: str) -> CommGroup:
    state.require(name)
    if not isinstance(group, CommGroup):
        valid = ", ".join(f"smp.{kind.name}" for kind in CommGroup)
        raise TypeError(f"{name}: group={group!r} is not a smp.CommGroup; expected one of {valid}")
    if state.groups.size(group) > 1:
        _require_no_step(name)
    return group


def _peer(rank: int, rank_type: object, name: str) -> int:
    """Return the global rank of another member of the caller's group."""
    state.require(name)
    if not isinstance(rank_type, RankType):
        valid = ", ".join(f"smp.RankType.{kind.name}" for kind in RankType)
        raise TypeError(f"{name}: rank_type={rank_type!r} is not a smp.RankType; expected one of {valid}")
    _require_no_step(name)
    members = state.groups.members(rank_type.group)
    if not isinstance(rank, int):
        raise TypeError(f"{name}: the rank must be an int, got {rank!r}")
    if not 0 <= rank < len(members):
        raise ValueError(
            f"{name}: there is no {rank_type.name} {rank} on rank {state.rank}: its group has "
            f"{len(members)} ranks, numbered from 0"
        )
    if members[rank] == state.rank:
        raise ValueError(f"{name}: {rank_type.name} {rank} is the calling rank {state.rank} itself")
    return members[rank]


def _require_no_step(name: str) -> None:
    require_meeting(
        name, instead=f"return what is to be sent from the step function, and call {name} after the step"
    )


def _post(obj: Any, rank: int) -> None:
    dist.send_object_list([obj], dst=rank, group=state.groups.messages)


def _await_receipt(rank: int, name: str) -> None:
    receipt = _receipt()
    dist.recv(receipt, src=rank, group=state.groups.messages)
    if receipt.item() != RECEIVED:  # but the length of an object
        raise SMPError(
            f"{name}: rank {rank} is sending to rank {state.rank} at the same time, so neither receives. "
            "smp.broadcast and smp.send are called by the sender alone; the others call "
            "smp.recv_from(the sender's rank, rank_type)"
        )


def _receipt() -> torch.Tensor:
    device = "cuda" if dist.get_backend(state.groups.messages) == "nccl" else "cpu"
    return torch.full((1,), RECEIVED, dtype=torch.int64, device=device)


def require_meeting(name: str, *, instead: str = "") -> None:
    """Refuse a call that ranks make together inside a step of a split model.

    Args:
        name: what was called.
        instead: what the user should do; by default, call it after the step.

    Raises:
        SMPError: the call comes from such a step.
    """
    if not state.initialized or state.groups.size(CommGroup.PP_GROUP) == 1:
        return
    if is_tracing() or (state.model is not None and state.model.running > 0):
        raise SMPError(
            f"{name} was called on rank {state.rank} inside a smp.step function. Its microbatches take "
            "turns, on each rank in an order of its own, and rank 0 runs it once more to plan the "
            f"partitions, so the ranks would not meet: {instead or 'call it after the step'}"
        )


def meet_for(name: str, *kinds: CommGroup, shards: bool = False) -> None:
    """Begin a call that the ranks of a replica make together; it is refused inside a step of a split model.

    Args:
        name: what was called.
        kinds: groups that take part besides those of one replica.
        shards: the replicas that share what is sharded take part, too.

    Raises:
        SMPError: the call comes from such a step, or others have called something else.
        DistBackendError: others are lost, or in a call of torch.distributed.
    """
    require_meeting(name)
    groups = [state.groups[kind] for kind in (*_OF_REPLICA, *kinds)]
    groups += [state.groups.shards] if shards else []
    _meet(name, groups)


def meet_sharing_tensors(name: str) -> None:
    """Begin a call of ranks that share distributed modules, if there are any.

    Args:
        name: what was called.

    Raises:
        SMPError: others have called something else.
        DistBackendError: others are lost, or in a call of torch.distributed.
    """
    group = state.groups[CommGroup.TP_GROUP]
    # Where it would wait for an accelerator, the next step has to tell.
    if state.model is not None and state.model.shards and control_device(group).type == "cpu":
        _meet(name, [group])


def _meet(name: str, groups: Sequence[dist.ProcessGroup]) -> None:
    try:
        for group in groups:
            if group.size() > 1:
                meet(name, group, control_device(group))
    except SMPError as error:
        if state.engine is not None:
            state.engine.errors.add(error, f" in {name}")
        raise
    except DistBackendError as error:
        raise DistBackendError(f"{name} on rank {state.rank} has not met the others: {error}") from error
