"""``tcp``, ``gloo`` and ``nccl``: collectives over torch's process groups, messages over our own connections.

CPU tensors go through the smddp group where all processes share a host, through Gloo otherwise. CUDA tensors
of ``tcp`` and ``gloo`` jobs are staged through the CPU; ``nccl`` jobs use torch's NCCL for everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch.distributed import DistError

from opensmd.collectives import build
from opensmd.collectives.backend import register
from opensmd.collectives.settings import Settings as CoreSettings
from opensmd.legacy import _torch_internals as c10d
from opensmd.legacy.capability import unsupported
from opensmd.legacy.names import reduce_op
from opensmd.legacy.rendezvous.meeting import Joined
from opensmd.legacy.requests import Request
from opensmd.legacy.settings import Deadline, Settings
from opensmd.legacy.transports.base import Channel, Transport
from opensmd.legacy.transports.engine import WIRES, choose_engine
from opensmd.legacy.transports.links import connect_all
from opensmd.legacy.transports.messages import Messages

__all__ = ["TorchTransport"]

T = TypeVar("T")

_OPS: dict[reduce_op, Any] = {
    reduce_op.SUM: c10d.ReduceOp.SUM,
    reduce_op.PRODUCT: c10d.ReduceOp.PRODUCT,
    reduce_op.MAX: c10d.ReduceOp.MAX,
    reduce_op.MIN: c10d.ReduceOp.MIN,
}


class TorchChannel(Channel):
    """A group over a private c10d process group.

    Args:
        group: the process group.
        engine: what carries it, one of :data:`~.engine.WIRES`.
    """

    def __init__(self, group: c10d.ProcessGroup, engine: str) -> None:
        self._group = group
        self._engine = engine
        self._wire = WIRES[engine]

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        landing = self._landing(tensor)
        options = _options(c10d.BroadcastOptions, root)
        self._run("broadcast", self._group.broadcast, [self._wire.moved(landing)], options)
        _write_back(tensor, landing)

    def all_reduce(self, tensor: torch.Tensor, op: reduce_op) -> None:
        wire = tensor if self._wire.takes(tensor, reducing=True) else self._wire.for_reducing(tensor)
        self._run("all_reduce", self._group.allreduce, [wire], _options(c10d.AllreduceOptions, None, op))
        _write_back(tensor, wire)

    def reduce(self, tensor: torch.Tensor, root: int, op: reduce_op) -> None:
        is_root = self._group.rank() == root
        wire = tensor if self._wire.takes(tensor, reducing=True) else self._wire.for_reducing(tensor)
        if wire is tensor and not is_root and not self._wire.spares_tensors:
            wire = tensor.detach().clone()
        self._run("reduce", self._group.reduce, [wire], _options(c10d.ReduceOptions, root, op))
        if is_root:
            _write_back(tensor, wire)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        landings = [self._landing(each, read=False) for each in outputs]
        moved = [self._wire.moved(each) for each in landings]
        options = _options(c10d.AllgatherOptions)
        self._run("all_gather", self._group.allgather, [moved], [self._moved(tensor)], options)
        _write_all_back(outputs, landings)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        landings = [self._landing(each, read=False) for each in outputs or ()]
        moved = [[self._wire.moved(each) for each in landings]] if outputs else []
        options = _options(c10d.GatherOptions, root)
        self._run("gather", self._group.gather, moved, [self._moved(tensor)], options)
        _write_all_back(outputs or (), landings)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        landing = self._landing(tensor, read=False)
        moved = [[self._moved(each) for each in inputs]] if inputs else []
        options = _options(c10d.ScatterOptions, root)
        self._run("scatter", self._group.scatter, [self._wire.moved(landing)], moved, options)
        _write_back(tensor, landing)

    def barrier(self) -> None:
        if self._wire.device == "cuda":
            # NCCL's own barrier guesses a device; this is the one the caller works on.
            self.all_reduce(torch.zeros(1, device="cuda"), reduce_op.SUM)
            torch.cuda.current_stream().synchronize()
        else:
            self._run("barrier", self._group.barrier, _options(c10d.BarrierOptions))

    def _run(self, function: str, operation: Callable[..., c10d.Work | None], *arguments: object) -> None:
        try:
            work = operation(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            place = f"rank {self._group.rank()} of {self._group.size()} in its group"
            raise RuntimeError(f"{function} on {place} ({self._engine}): {error}") from error

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the engine sends for ``tensor``."""
        if self._wire.takes(tensor, reducing=False):
            return tensor
        return self._wire.moved(self._wire.for_moving(tensor))

    def _landing(self, tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
        """Contiguous memory where the engine can put what ``tensor`` is to hold; maybe the tensor itself."""
        if tensor.is_contiguous() and tensor.device.type == self._wire.device:
            return tensor
        if read:
            return self._wire.for_moving(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._wire.device)


class TorchTransport(Transport):
    """A job of the backends ``tcp``, ``gloo`` and ``nccl``.

    Args:
        backend: the backend's name.
        joined: the finished meeting.
        settings: timeout and engine.

    Raises:
        RuntimeError: the engine is not there, or a process could not be reached.
    """

    def __init__(self, backend: str, joined: Joined, settings: Settings) -> None:
        self.rank = joined.rank
        self.world_size = joined.world_size
        self._backend = backend
        self._joined = joined
        self._store = joined.store
        self._timeout = settings.timeout
        self._made = 0
        self._groups: list[c10d.ProcessGroup] = []
        self.engine = "nccl" if backend == "nccl" else agree_on_engine(joined, settings)
        world = self.channel(list(range(self.world_size)))
        assert world is not None
        self._messages: Messages | None = None
        if backend != "nccl":
            links = connect_all(self._store, self.rank, self.world_size, Deadline(settings.timeout))
            self._messages = Messages(links, self.rank, settings.timeout)
            # A rank that ends early takes the store with it: nobody may still need that for the set-up.
            world.barrier()
        self.world: Channel = world

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
        )
        self._groups.append(group)
        return TorchChannel(group, self.engine)

    def _compare(self, key: str, ranks: list[int]) -> None:
        """All processes must make the same group; torch would wait in vain for one that does not."""
        self._store.set(f"{key}/{self.rank}", json.dumps(ranks))
        deadline = Deadline(self._timeout)
        for other in range(self.world_size):
            theirs = json.loads(self._wait_for(f"{key}/{other}", deadline, other))
            if theirs != ranks:
                raise RuntimeError(
                    f"new_group: rank {self.rank} names ranks {ranks}, rank {other} names "
                    f"{theirs}; every process "
                    "of the job calls new_group, in the same order, with the same ranks"
                )

    def _wait_for(self, key: str, deadline: Deadline, other: int) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=max(deadline.remaining(), 0.01)))
            return self._store.get(key)
        except DistError as error:
            raise RuntimeError(
                f"new_group on rank {self.rank}: rank {other} has not called it within "
                f"{deadline.seconds:g} s, or the "
                "job has lost its store; every process of the job calls new_group, in the same order"
            ) from error

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self._messages is None:
            self.isend(tensor, dst).wait()
        else:
            self._messages.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        if self._messages is not None:
            receive = self._messages.irecv(tensor, src)
            receive.wait()
            assert receive.sender is not None
            return receive.sender
        if src is None:
            raise RuntimeError(unsupported("nccl", "recv from any source", ("tcp", "gloo", "mpi")))
        self.irecv(tensor, src).wait()
        return src

    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        if self._messages is not None:
            return self._messages.isend(tensor, dst)
        wire = WIRES["nccl"]
        return WorkRequest(self._groups[0].send([wire.moved(wire.for_moving(tensor))], dst, 0))

    def irecv(self, tensor: torch.Tensor, src: int) -> Request:
        if self._messages is not None:
            return self._messages.irecv(tensor, src)
        wire = WIRES["nccl"]
        landing = wire.for_moving(tensor)
        return WorkRequest(
            self._groups[0].recv([wire.moved(landing)], src, 0), lambda: _write_back(tensor, landing)
        )

    def close(self) -> None:
        if self._messages is not None:
            self._messages.close()
        while self._groups:
            self._groups.pop().shutdown()


class WorkRequest(Request):
    """A c10d Work as a request; ``finish`` runs once when it is done."""

    def __init__(self, work: c10d.Work, finish: Callable[[], None] | None = None) -> None:
        self._work: c10d.Work | None = work
        self._finish = finish

    def is_completed(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self.wait()
        return self._work is None

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = None


def agree_on_engine(joined: Joined, settings: Settings) -> str:
    """The engine for CPU tensors that all processes of the job can use."""
    has = settings.engine != "gloo" and has_smddp()
    joined.store.set(f"engine/{joined.rank}", "1" if has else "0")
    answers = joined.store.multi_get([f"engine/{rank}" for rank in range(joined.world_size)])
    engine = choose_engine(settings.engine, joined.processes, [answer == b"1" for answer in answers])
    if engine == "smddp":
        register()
    return engine


def has_smddp() -> bool:
    """Whether the native core of the smddp backend is there, or can be built."""
    native = CoreSettings.from_environment()
    if not native.native:
        return False
    try:
        build.load(native)
    except build.BuildError:
        return False
    return True


def _write_back(tensor: torch.Tensor, wire: torch.Tensor) -> None:
    if wire is not tensor:
        tensor.detach().copy_(wire)


def _write_all_back(tensors: Sequence[torch.Tensor], wires: Sequence[torch.Tensor]) -> None:
    for tensor, wire in zip(tensors, wires, strict=True):
        _write_back(tensor, wire)


@cache
def _options(kind: type[T], root: int | None = None, op: reduce_op | None = None) -> T:
    """Options of a blocking call; made once, because making them costs as much as a small collective."""
    options: Any = kind()
    options.asyncOp = False
    if root is not None:
        options.rootRank = root
    if op is not None:
        options.reduceOp = _OPS[op]
    return cast(T, options)
