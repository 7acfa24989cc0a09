"""The one object that ``init_process_group`` makes: a job this process takes part in."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import torch

from opensmd.legacy.capability import BACKENDS
from opensmd.legacy.groups import Group, group
from opensmd.legacy.rendezvous.join import join
from opensmd.legacy.settings import LegacySettings
from opensmd.legacy.transports.base import LegacyTransport
from opensmd.legacy.transports.mpi import MpiTransport
from opensmd.legacy.transports.torch import TorchTransport

__all__ = ["Session", "open_session"]


class Session:
    """A job: its transport, and the groups made in it.

    Args:
        backend: the backend's name, in lower case.
        transport: how its calls travel.
    """

    def __init__(self, backend: str, transport: LegacyTransport) -> None:
        self.backend = backend
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.world = Group(list(range(transport.world_size)), transport.world)
        self._groups = [self.world]
        self._pid = os.getpid()

    def close(self) -> None:
        """Leave the job; a fork of its process, which shares its connections, only forgets it."""
        if os.getpid() == self._pid:
            self.transport.close()

    def new_group(self, ranks: Sequence[int] | None) -> Group:
        """Make a group; all processes of the job call, in the same order.

        Raises:
            TypeError: something else than integers, such as text.
            ValueError: a rank that is not one of the job, or one named twice.
            RuntimeError: the processes named different ranks.
        """
        members = list(range(self.world_size)) if ranks is None else _integers(ranks)
        outside = [rank for rank in members if not 0 <= rank < self.world_size]
        if outside or len(set(members)) != len(members) or not members:
            raise ValueError(
                f"new_group(ranks={members}): expected different ranks from 0 to {self.world_size - 1}, at "
                "least one"
            )
        group = Group(members, self.transport.channel(members))
        self._groups.append(group)
        return group

    def resolve(self, given: object) -> Group:
        """The group meant by an argument: a handle, or its number, because handles once were numbers.

        The tutorial of 2017 passes ``group=0``, which was and is ``group.WORLD``; the groups that
        ``new_group`` made follow from 1.

        Raises:
            ValueError: it is not a group of this job.
        """
        if given is group.WORLD:
            return self.world
        if type(given) is int and 0 <= given < len(self._groups):
            return self._groups[given]
        if not isinstance(given, Group) or given not in self._groups:
            raise ValueError(f"group={given!r}: expected group.WORLD or what new_group returned in this job")
        return given

    def position(self, within: Group, rank: int, role: str) -> int:
        """The position in a group of a rank of the job, given as the argument ``role``.

        Raises:
            ValueError: it is not a member.
        """
        try:
            return within.positions[rank]
        except (KeyError, TypeError):
            raise ValueError(
                f"{role}={rank!r} is not in the group; expected one of the ranks {list(within.ranks)}"
            ) from None


def _integers(ranks: Iterable[SupportsIndex]) -> list[int]:
    try:
        return [operator.index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"new_group(ranks={ranks!r}): expected a list of integers") from None


def open_session(backend: str, init_method: str, *, rank: int, world_size: int, group_name: str) -> Session:
    """Join a job; blocks until all its processes have.

    Raises:
        RuntimeError: an unknown backend, or the job cannot start.
        ValueError: arguments that are missing, malformed or contradict each other.
    """
    name = str(backend).lower()
    if name not in BACKENDS:
        raise RuntimeError(
            f"Invalid distributed backend name: {backend}; expected one of {', '.join(BACKENDS)}"
        )
    if name == "mpi":
        transport: LegacyTransport = MpiTransport()
        _warn_of_ignored(transport, world_size)
        return Session(name, transport)
    if name == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise RuntimeError(
            "backend 'nccl' needs a CUDA device and a torch that was built with NCCL, but there is none "
            "here; use the backend tcp or gloo"
        )
    settings = LegacySettings.from_environment()
    joined = join(init_method, rank=rank, world_size=world_size, group_name=group_name, settings=settings)
    return Session(name, TorchTransport(name, joined, settings))


def _warn_of_ignored(transport: LegacyTransport, world_size: int) -> None:
    # Scripts of the time pass rank=0, world_size=0 to mpi; only a real contradiction is worth a word.
    if world_size > 0 and world_size != transport.world_size:
        warnings.warn(
            f"world_size={world_size} is ignored: MPI has started {transport.world_size} process(es); start "
            f"the script with mpiexec -n {world_size}",
            stacklevel=4,
        )
