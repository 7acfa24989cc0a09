"""Messages of the ``nccl`` backend, directly through its process group, without receives from any rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from opensmd.legacy import _torch_internals as c10d
from opensmd.legacy.capability import unsupported
from opensmd.legacy.requests import Request
from opensmd.legacy.transports.wire import Wire

__all__ = ["DeviceMessages"]


class DeviceMessages:
    """One rank's end of all messages.

    Args:
        group: the process group of the whole job.
        wire: what its engine accepts.
    """

    def __init__(self, group: c10d.ProcessGroup, wire: Wire) -> None:
        self._group = group
        self._wire = wire

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send ``tensor``; return when it may be changed."""
        self.isend(tensor, dst).wait()

    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        """Receive from ``src``, which must be given.

        Raises:
            RuntimeError: it is None.
        """
        if src is None:
            raise RuntimeError(unsupported("nccl", "recv from any source", ("tcp", "gloo", "mpi")))
        self.irecv(tensor, src).wait()
        return src

    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        """Start sending."""
        wire = self._wire.moved(self._wire.for_moving(tensor))
        return WorkRequest(self._group.send([wire], dst, 0))

    def irecv(self, tensor: torch.Tensor, src: int) -> Request:
        """Start receiving."""
        landing = self._wire.for_moving(tensor)
        work = self._group.recv([self._wire.moved(landing)], src, 0)
        if landing.data_ptr() == tensor.data_ptr():
            return WorkRequest(work)
        return WorkRequest(work, lambda: tensor.detach().copy_(landing))

    def close(self) -> None:
        """Do nothing: the group's owner shuts it down."""


class WorkRequest(Request):
    """A c10d Work as a request; ``finish`` runs once when it is done."""

    def __init__(self, work: c10d.Work, finish: Callable[[], object] | None = None) -> None:
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
