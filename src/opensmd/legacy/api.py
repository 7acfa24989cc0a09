"""The functions of ``torch.distributed.deprecated``, which check arguments and leave the rest to a transport.

Written from the documentation of torch 1.0 (``torch.distributed.deprecated``). Ranks in arguments are always
ranks of the whole job. In a process that is not a member of the named group, a collective silently does
nothing.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opensmd.legacy.capability import check_tensors
from opensmd.legacy.groups import Group, group
from opensmd.legacy.names import checked_operation, dist_backend, reduce_op
from opensmd.legacy.requests import Request
from opensmd.legacy.session import Session, open_session

__all__ = [
    "all_gather",
    "all_reduce",
    "backend_in_use",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "get_rank",
    "get_world_size",
    "init_master_worker",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "mode_in_use",
    "new_group",
    "recv",
    "reduce",
    "scatter",
    "send",
]

_session: Session | None = None
_INITIALIZED_PG, _INITIALIZED_MW = 1, 2


def is_available() -> bool:
    """Whether the package can be used, that is, torch itself was built with ``torch.distributed``."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Whether :func:`init_process_group` has been called, and :func:`destroy_process_group` not since."""
    return _session is not None


def backend_in_use() -> dist_backend:
    """Return what scripts read as ``_backend``: the job's backend, or ``UNDEFINED``."""
    return dist_backend.UNDEFINED if _session is None else dist_backend[_session.backend.upper()]


def mode_in_use() -> int:
    """Return what scripts read as ``_initialized``: whether there is a job, as one of the old constants."""
    return 0 if _session is None else _INITIALIZED_PG


def init_process_group(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Join a job; block until all its processes have joined.

    Args:
        backend: ``tcp``, ``gloo``, ``mpi`` or ``nccl``, in upper or lower case.
        init_method: ``env://``, ``tcp://host:port``, ``tcp://[multicast address]:port`` or ``file:///path``;
            ``mpi`` takes rank and world size from MPI and ignores it.
        world_size: number of processes.
        rank: this process's rank; ``file`` and multicast assign one if it is not given.
        group_name: separates jobs that use the same file or multicast address.

    Raises:
        AssertionError: an unknown keyword.
        TypeError: a rank or world size that is not an int.
        RuntimeError: an unknown backend, a second call, or a job that cannot start; the text says why.
        ValueError: arguments that are missing, malformed or contradict each other.
    """
    global _session
    world_size = kwargs.pop("world_size", -1)
    rank = kwargs.pop("rank", -1)
    group_name = kwargs.pop("group_name", "")
    if kwargs:
        raise AssertionError(
            f"init_process_group got unexpected keyword(s) {', '.join(sorted(kwargs))}; expected "
            "world_size, rank and group_name"
        )
    if _session is not None:
        raise RuntimeError("trying to initialize torch.distributed.deprecated twice!")
    for name, number in (("world_size", world_size), ("rank", rank)):
        if not isinstance(number, int):
            raise TypeError(f"init_process_group: {name} must be an int, got {number!r}")
    _session = open_session(backend, init_method, rank=rank, world_size=world_size, group_name=group_name)
    atexit.register(destroy_process_group)


def init_master_worker(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Refuse the experimental master-worker mode of torch 1.0, which ran operations on remote tensors.

    Raises:
        RuntimeError: always; ``torch.distributed.rpc`` has replaced it.
    """
    raise RuntimeError(
        "the master-worker mode does not exist any more; use init_process_group, or torch.distributed.rpc "
        "for operations on remote tensors"
    )


def destroy_process_group() -> None:
    """Leave the job: deliver what has been sent, and end all groups. Does nothing without a job."""
    global _session
    session, _session = _session, None
    atexit.unregister(destroy_process_group)
    if session is not None:
        session.close()


def current_session() -> Session:
    """Return the job of this process.

    Raises:
        AssertionError: there is none.
    """
    if _session is None:
        raise AssertionError("torch.distributed.deprecated is not initialized: call init_process_group first")
    return _session


def get_rank() -> int:
    """Return this process's rank in the job, from 0 to ``get_world_size() - 1``."""
    return current_session().rank


def get_world_size() -> int:
    """Return the number of processes of the job."""
    return current_session().world_size


def new_group(ranks: Sequence[int] | None = None) -> Group:
    """Create a group of ``ranks`` (None: all).

    Every process of the job must call this, in the same order and with the same ranks, members or not.

    Returns:
        An opaque handle for the ``group`` argument of the collectives.

    Raises:
        TypeError: anything but integers.
        ValueError: a rank that is not in the job, or is named twice.
        RuntimeError: the processes named different ranks, or one did not call.
    """
    return current_session().new_group(ranks)


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send ``tensor`` to rank ``dst``; return when it may be changed, perhaps before it is received."""
    session = _point_to_point("send", tensor, dst, "dst")
    session.transport.send(tensor, dst)


def recv(tensor: torch.Tensor, src: int | None = None) -> int:
    """Receive into ``tensor`` from rank ``src``, or from any rank if it is None.

    Returns:
        The sender's rank.

    Raises:
        RuntimeError: the sender's tensor has another size or dtype, the sender has ended, or nothing came in
            time.
    """
    session = _point_to_point("recv", tensor, src, "src")
    return session.transport.recv(tensor, src)


def isend(tensor: torch.Tensor, dst: int) -> Request:
    """Start sending ``tensor`` to rank ``dst``; do not change it before the request is complete.

    Returns:
        A request with ``is_completed()`` and ``wait()``.
    """
    session = _point_to_point("isend", tensor, dst, "dst")
    return session.transport.isend(tensor, dst)


def irecv(tensor: torch.Tensor, src: int) -> Request:
    """Start receiving into ``tensor`` from rank ``src``; do not use it before the request is complete.

    Returns:
        A request with ``is_completed()`` and ``wait()``.
    """
    session = _point_to_point("irecv", tensor, src, "src")
    return session.transport.irecv(tensor, src)


def broadcast(tensor: torch.Tensor, src: int, group: Group = group.WORLD) -> None:
    """Copy ``tensor`` from rank ``src`` to the tensors of all members, which have its size and dtype."""
    session, within = _within(group)
    if within.channel is not None:
        check_tensors(session.backend, "broadcast", (tensor,))
        within.channel.broadcast(tensor, session.position(within, src, "src"))


def all_reduce(tensor: torch.Tensor, op: reduce_op = reduce_op.SUM, group: Group = group.WORLD) -> None:
    """Reduce the members' tensors element by element, in place; all get the same bits."""
    session, within = _within(group)
    if within.channel is not None:
        check_tensors(session.backend, "all_reduce", (tensor,))
        within.channel.all_reduce(tensor, checked_operation(op))


def reduce(tensor: torch.Tensor, dst: int, op: reduce_op = reduce_op.SUM, group: Group = group.WORLD) -> None:
    """Reduce the members' tensors element by element into the one of rank ``dst``; the others keep theirs."""
    session, within = _within(group)
    if within.channel is not None:
        check_tensors(session.backend, "reduce", (tensor,))
        within.channel.reduce(tensor, session.position(within, dst, "dst"), checked_operation(op))


def all_gather(tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Group = group.WORLD) -> None:
    """Copy every member's ``tensor`` to ``tensor_list``, by position in the group, on all members.

    Raises:
        RuntimeError: ``tensor_list`` does not have one tensor per member, each like ``tensor``.
    """
    session, within = _within(group)
    if within.channel is not None:
        check_tensors(session.backend, "all_gather", (tensor,), tensor_list)
        _check_list("all_gather", "tensor_list", tensor_list, tensor, within)
        within.channel.all_gather(tensor_list, tensor)


def gather(tensor: torch.Tensor, **kwargs: Any) -> None:
    """Copy every member's ``tensor`` to ``gather_list`` on rank ``dst``, by position in the group.

    Args:
        tensor: this process's part.
        dst: the rank that gets them; by default the caller's own rank, so it must be given on every other
            rank.
        gather_list: only on ``dst``: one tensor per member, each like ``tensor``.
        group: default ``group.WORLD``.

    Raises:
        RuntimeError: no ``gather_list`` on ``dst``, one elsewhere, one that does not fit, or an unknown
            keyword.
    """
    call = _RootedCall.of("gather", "dst", "gather_list", kwargs)
    if call.within.channel is not None:
        root = call.checked_root(tensor)
        call.within.channel.gather(call.tensors, tensor, root)


def scatter(tensor: torch.Tensor, **kwargs: Any) -> None:
    """Copy ``scatter_list`` on rank ``src``, by position in the group, to each member's ``tensor``.

    Args:
        tensor: receives this process's part.
        src: the rank that has them; by default the caller's own rank, so it must be given on every other
            rank.
        scatter_list: only on ``src``: one tensor per member, each like ``tensor``.
        group: default ``group.WORLD``.

    Raises:
        RuntimeError: no ``scatter_list`` on ``src``, one elsewhere, one that does not fit, or an unknown
            keyword.
    """
    call = _RootedCall.of("scatter", "src", "scatter_list", kwargs)
    if call.within.channel is not None:
        root = call.checked_root(tensor)
        call.within.channel.scatter(tensor, call.tensors, root)


def barrier(group: Group = group.WORLD) -> None:
    """Wait until all members are here."""
    _, within = _within(group)
    if within.channel is not None:
        within.channel.barrier()


def _clear_group_cache(group: Group = group.WORLD) -> None:
    """Do nothing; formerly freed the nccl backend's communicators of a group, which has just one today."""
    current_session().resolve(group)


def _register_stream(stream: object) -> None:
    """Warn that this is unnecessary; formerly told the nccl backend about a CUDA stream."""
    warnings.warn(
        f"_register_stream({stream!r}) is ignored: collectives wait for the current stream's work; call them "
        "under torch.cuda.stream(stream)",
        stacklevel=2,
    )


def _within(group: object) -> tuple[Session, Group]:
    session = current_session()
    return session, session.resolve(group)


def _point_to_point(function: str, tensor: torch.Tensor, peer: int | None, role: str) -> Session:
    """Check what a message needs: a job, another rank in it, and a tensor that the backend can move."""
    session = current_session()
    if peer is not None or function != "recv":
        if not isinstance(peer, int) or not 0 <= peer < session.world_size:
            raise ValueError(
                f"{function}: {role}={peer!r}; expected a rank from 0 to {session.world_size - 1}"
            )
        if peer == session.rank:
            raise ValueError(f"{function}: {role}={peer} is this process itself; expected another rank")
    check_tensors(session.backend, function, (tensor,))
    return session


def _check_list(
    function: str, name: str, tensors: Sequence[torch.Tensor], tensor: torch.Tensor, within: Group
) -> None:
    if len(tensors) != len(within.ranks):
        raise RuntimeError(
            f"{function}: {name} has {len(tensors)} tensors; expected {len(within.ranks)}, one for each "
            "member"
        )
    count, dtype = tensor.numel(), tensor.dtype
    for index, part in enumerate(tensors):
        if part.numel() != count or part.dtype != dtype:
            raise RuntimeError(
                f"{function}: tensor sizes do not match: {name}[{index}] has {part.numel()} elements of "
                f"{part.dtype}, tensor has {tensor.numel()} of {tensor.dtype}"
            )


class _RootedCall(NamedTuple):
    """A ``gather`` or ``scatter``, in which one rank, the root, has a list of tensors.

    Attributes:
        function: its name.
        role: the keyword of the root.
        list_name: the keyword of its list.
        rank: the root, in the job.
        tensors: the list; None on other ranks.
    """

    function: str
    role: str
    list_name: str
    session: Session
    within: Group
    rank: int
    tensors: Sequence[torch.Tensor] | None

    @classmethod
    def of(cls, function: str, role: str, list_name: str, kwargs: dict[str, Any]) -> _RootedCall:
        """Create the call with these keywords.

        Raises:
            RuntimeError: an unknown keyword.
        """
        unknown = kwargs.keys() - {role, list_name, "group"}
        if unknown:
            raise RuntimeError(
                f"{function} got unexpected keyword(s) {', '.join(sorted(unknown))}; expected {role}, "
                f"{list_name} and group"
            )
        session, within = _within(kwargs.get("group", group.WORLD))
        return cls(
            function, role, list_name, session, within, kwargs.get(role, session.rank), kwargs.get(list_name)
        )

    def checked_root(self, tensor: torch.Tensor) -> int:
        """Return the root's position in the group, after checking this rank's list.

        Raises:
            RuntimeError: no list on the root, one elsewhere, or one that does not fit.
        """
        root = self.session.position(self.within, self.rank, self.role)
        check_tensors(self.session.backend, self.function, (tensor,), self.tensors)
        mine = self.session.rank
        if mine == self.rank:
            if self.tensors is None:
                raise RuntimeError(
                    f"{self.function}: rank {mine} is {self.role} and gave no {self.list_name}; it needs one"
                )
            _check_list(self.function, self.list_name, self.tensors, tensor, self.within)
        elif self.tensors:
            raise RuntimeError(
                f"{self.function}: rank {mine} gave a {self.list_name}, but {self.role} is {self.rank}; only "
                "that rank gives one"
            )
        return root
