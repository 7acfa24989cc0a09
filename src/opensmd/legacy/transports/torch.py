"""``tcp``, ``gloo`` and ``nccl``: collectives over torch's process groups, with separate messages.

CPU tensors go through an smddp group if all processes share a host, otherwise through Gloo. CUDA tensors of
``tcp`` and ``gloo`` jobs are staged through the CPU; ``nccl`` jobs use torch's NCCL throughout.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch
from torch.distributed import DistError

from opensmd.collectives.backend import register
from opensmd.environment.settings import Settings as CoreSettings
from opensmd.legacy import _torch_internals as c10d
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.requests import Request
from opensmd.legacy.settings import Deadline, LegacySettings
from opensmd.legacy.transports.base import Channel, LegacyTransport
from opensmd.legacy.transports.channel import TorchChannel
from opensmd.legacy.transports.device_messages import DeviceMessages
from opensmd.legacy.transports.engine import WIRES, choose_engine
from opensmd.legacy.transports.links import connect_all
from opensmd.legacy.transports.messages import Messages
from opensmd.native import build

__all__ = ["TorchTransport"]


class TorchTransport(LegacyTransport):
    """A job of the backends ``tcp``, ``gloo`` and ``nccl``.

    Args:
        backend: the backend's name.
        joined: the finished rendezvous.
        settings: timeout and engine.

    Raises:
        RuntimeError: the engine is missing, or a process could not be reached.
    """

    def __init__(self, backend: str, joined: Joined, settings: LegacySettings) -> None:
        self.rank = joined.rank
        self.world_size = joined.world_size
        self._store = joined.store
        self._one_network = joined.one_network
        self._timeout = settings.timeout
        self._made = 0
        self._groups: list[c10d.ProcessGroup] = []
        self.engine = "nccl" if backend == "nccl" else agree_on_engine(joined, settings)
        world = self.channel(list(range(self.world_size)))
        assert world is not None
        self.world = world
        self._messages: Messages | DeviceMessages
        if backend == "nccl":
            self._messages = DeviceMessages(self._groups[0], WIRES["nccl"])
            return
        links = connect_all(joined, settings.interface, Deadline(settings.timeout))
        self._messages = Messages(links, self.rank, settings.timeout)
        # A rank that ends early takes the store with it, so nobody may still need it for the set-up.
        world.barrier()

    def channel(self, ranks: list[int]) -> Channel | None:
        self._made += 1
        self._compare(f"group/{self._made}", ranks)
        if self.rank not in ranks:
            return None
        group = c10d.private_group(
            self.engine,
            store=self._store,
            name=f"deprecated/{self._made}",
            rank=self.rank,
            ranks=ranks,
            timeout=self._timeout,
            one_network=self._one_network,
        )
        self._groups.append(group)
        return TorchChannel(group, self.engine)

    def _compare(self, key: str, ranks: list[int]) -> None:
        """Check that all processes create the same group; torch would wait in vain for one that does not."""
        self._store.set(f"{key}/{self.rank}", json.dumps(ranks))
        deadline = Deadline(self._timeout)
        for other in range(self.world_size):
            theirs = json.loads(self._wait_for(f"{key}/{other}", deadline, other))
            if theirs != ranks:
                raise RuntimeError(
                    f"new_group: rank {self.rank} names ranks {ranks}, rank {other} names {theirs}; every "
                    "process of the job calls new_group, in the same order, with the same ranks"
                )

    def _wait_for(self, key: str, deadline: Deadline, other: int) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=max(deadline.remaining(), 0.01)))
            return self._store.get(key)
        except DistError as error:
            raise RuntimeError(
                f"new_group on rank {self.rank}: rank {other} has not called it within {deadline.seconds:g} "
                "s, or the job has lost its store; every process of the job calls new_group, in the same "
                "order"
            ) from error

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._messages.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        return self._messages.recv(tensor, src)

    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        return self._messages.isend(tensor, dst)

    def irecv(self, tensor: torch.Tensor, src: int) -> Request:
        return self._messages.irecv(tensor, src)

    def close(self) -> None:
        self._messages.close()
        while self._groups:
            self._groups.pop().shutdown()


def agree_on_engine(joined: Joined, settings: LegacySettings) -> str:
    """Return the engine for CPU tensors that all processes of the job can use."""
    has = settings.engine != "gloo" and has_smddp()
    joined.store.set(f"engine/{joined.rank}", "1" if has else "0")
    answers = joined.store.multi_get([f"engine/{rank}" for rank in range(joined.world_size)])
    engine = choose_engine(settings.engine, joined.processes, [answer == b"1" for answer in answers])
    if engine == "smddp":
        register()
    return engine


def has_smddp() -> bool:
    """Whether the native core of the smddp backend exists or can be built."""
    native = CoreSettings.from_environment()
    if not native.native:
        return False
    try:
        build.load(native)
    except build.BuildError:
        return False
    return True
