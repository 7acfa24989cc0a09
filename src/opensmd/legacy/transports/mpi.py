"""``mpi``: a real MPI through mpi4py. Rank and world size are MPI's; start with ``mpiexec``.

MPI itself keeps the order between two ranks, supports receives from any source and reports the sender. What
it lacks is added here: half precision is reduced in float32, CUDA and non-contiguous tensors are staged, and
a blocking send copies its tensor, so that all ranks may send before any receives.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from opensmd.legacy.names import reduce_op
from opensmd.legacy.requests import Request
from opensmd.legacy.transports.base import Channel, LegacyTransport
from opensmd.legacy.transports.wire import Wire, bytes_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport"]

WIRE = Wire(
    "cpu", None, {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
)
FORWARDING_SECONDS = 0.5  # when a job is aborted, mpiexec drops output that it has not forwarded yet
BUFFERED_BYTES = 256 << 20  # copies of blocking sends that have not been received yet; above, send waits


def load_mpi() -> ModuleType:
    """Return mpi4py's MPI module; importing it initialises MPI.

    Raises:
        RuntimeError: mpi4py or an MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"backend 'mpi' needs mpi4py and an MPI library ({error}); install both with pip install "
            "'opensmd[mpi]', or use the backend tcp or gloo"
        ) from error
    return MPI


class MpiChannel(Channel):
    """A group over an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm, mpi: ModuleType) -> None:
        self._comm = comm
        self._mpi = mpi
        self._ops = {
            reduce_op.SUM: mpi.SUM,
            reduce_op.PRODUCT: mpi.PROD,
            reduce_op.MAX: mpi.MAX,
            reduce_op.MIN: mpi.MIN,
        }

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        wire = WIRE.for_moving(tensor)
        self._comm.Bcast([bytes_of(wire), self._mpi.BYTE], root)
        _write_back(tensor, wire)

    def all_reduce(self, tensor: torch.Tensor, op: reduce_op) -> None:
        wire = WIRE.for_reducing(tensor)
        self._comm.Allreduce(self._mpi.IN_PLACE, _elements(wire), self._ops[op])
        _write_back(tensor, wire)

    def reduce(self, tensor: torch.Tensor, root: int, op: reduce_op) -> None:
        wire = WIRE.for_reducing(tensor)
        if self._comm.rank == root:
            self._comm.Reduce(self._mpi.IN_PLACE, _elements(wire), self._ops[op], root)
            _write_back(tensor, wire)
        else:
            self._comm.Reduce(_elements(wire), None, self._ops[op], root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        wire = WIRE.for_moving(tensor)
        landing = torch.empty((len(outputs), wire.numel()), dtype=wire.dtype, device="cpu")
        self._comm.Allgather([bytes_of(wire), self._mpi.BYTE], [bytes_of(landing), self._mpi.BYTE])
        _spread(landing, outputs)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        wire = WIRE.for_moving(tensor)
        if not outputs:
            self._comm.Gather([bytes_of(wire), self._mpi.BYTE], None, root)
            return
        landing = torch.empty((len(outputs), wire.numel()), dtype=wire.dtype, device="cpu")
        self._comm.Gather([bytes_of(wire), self._mpi.BYTE], [bytes_of(landing), self._mpi.BYTE], root)
        _spread(landing, outputs)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        wire = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        parts = None
        if inputs:
            parts = [
                bytes_of(torch.stack([WIRE.for_moving(tensor).view(-1) for tensor in inputs])),
                self._mpi.BYTE,
            ]
        self._comm.Scatter(parts, [bytes_of(wire), self._mpi.BYTE], root)
        _write_back(tensor, wire)

    def barrier(self) -> None:
        self._comm.Barrier()


class MpiTransport(LegacyTransport):
    """A job under ``mpiexec``."""

    def __init__(self) -> None:
        self._mpi = load_mpi()
        # Copies, because the script may also use mpi4py itself, and messages must not be mixed up with
        # collectives.
        self._comm: MPI.Intracomm = self._mpi.COMM_WORLD.Dup()
        self._messages: MPI.Intracomm = self._mpi.COMM_WORLD.Dup()
        self.rank = self._comm.rank
        self.world_size = self._comm.size
        self.world: Channel = MpiChannel(self._comm, self._mpi)
        self._channels: list[MPI.Intracomm] = []
        self._restore_hook = _abort_when_a_rank_fails(self._mpi)
        self._unfinished: deque[MpiRequest] = deque()  # including those whose request the script has dropped

    def channel(self, ranks: list[int]) -> Channel | None:
        for other, theirs in enumerate(self._comm.allgather(ranks)):
            if theirs != ranks:
                raise RuntimeError(
                    f"new_group: rank {self.rank} names ranks {ranks}, rank {other} names {theirs}; every "
                    "process of the job calls new_group, in the same order, with the same ranks"
                )
        comm: Any = self._comm.Create(self._comm.Get_group().Incl(ranks))
        if comm == self._mpi.COMM_NULL:
            return None
        self._channels.append(comm)
        return MpiChannel(comm, self._mpi)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._forget_finished()
        copy = WIRE.for_moving(tensor).clone()
        # Never for receives, which the other rank may answer only when it has this message.
        copies = deque(request for request in self._unfinished if request.buffered)
        while copies and sum(request.buffered for request in copies) + copy.nbytes > BUFFERED_BYTES:
            copies[0].wait()
            self._unfinished.remove(copies.popleft())
        self._start_send(copy, dst, buffered=copy.nbytes)

    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        self._forget_finished()
        return self._start_send(WIRE.for_moving(tensor), dst, buffered=0)

    def _start_send(self, wire: torch.Tensor, dst: int, *, buffered: int) -> MpiRequest:
        handle = self._messages.Isend([bytes_of(wire), self._mpi.BYTE], dst)
        request = MpiRequest(
            self._mpi, handle, wire, None, f"send on rank {self.rank} to rank {dst}", buffered
        )
        self._unfinished.append(request)
        return request

    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        self._forget_finished()
        status = self._mpi.Status()
        message = self._messages.Mprobe(
            self._mpi.ANY_SOURCE if src is None else src, self._mpi.ANY_TAG, status
        )
        landing = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([landing, self._mpi.BYTE])
        sender: int = status.Get_source()
        wire = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if len(landing) != wire.nbytes:
            raise RuntimeError(
                _mismatch(f"recv on rank {self.rank} from rank {sender}", len(landing), wire.nbytes)
            )
        bytes_of(wire)[:] = landing
        _write_back(tensor, wire)
        return sender

    def irecv(self, tensor: torch.Tensor, src: int) -> Request:
        self._forget_finished()
        direct = tensor.is_contiguous() and not tensor.is_cuda
        wire = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        handle = self._messages.Irecv([bytes_of(wire), self._mpi.BYTE], src)
        request = MpiRequest(self._mpi, handle, wire, tensor, f"recv on rank {self.rank} from rank {src}", 0)
        self._unfinished.append(request)
        return request

    def close(self) -> None:
        self._restore_hook()
        for request in self._unfinished:
            if request.sends:
                request.wait()
        self._unfinished.clear()
        for comm in (*self._channels, self._messages, self._comm):
            comm.Free()

    def _forget_finished(self) -> None:
        while self._unfinished and self._unfinished[0].is_completed():
            self._unfinished.popleft()


def _abort_when_a_rank_fails(mpi: ModuleType) -> Callable[[], None]:
    """End the whole job on an uncaught exception; otherwise MPI would wait forever for this rank at its end.

    Returns:
        A function that undoes this.
    """
    before = sys.excepthook

    def report_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        time.sleep(FORWARDING_SECONDS)
        mpi.COMM_WORLD.Abort(1)

    def restore() -> None:
        if sys.excepthook is report_and_abort:
            sys.excepthook = before

    sys.excepthook = report_and_abort
    return restore


class MpiRequest(Request):
    """An MPI request with the memory that MPI works on.

    Args:
        mpi: mpi4py's module.
        handle: the request.
        wire: what MPI reads or writes; kept alive until the end.
        target: the tensor to fill at the end; None for a send.
        what: the operation, for error texts.
        buffered: bytes of ``wire`` that are a copy.
    """

    def __init__(
        self,
        mpi: ModuleType,
        handle: MPI.Request,
        wire: torch.Tensor,
        target: torch.Tensor | None,
        what: str,
        buffered: int,
    ) -> None:
        self._mpi = mpi
        self._handle = handle
        self._wire = wire
        self._target = target
        self._what = what
        self._finished = False
        self._error: str | None = None
        self.buffered = buffered

    @property
    def sends(self) -> bool:
        """Whether this is a send."""
        return self._target is None

    def is_completed(self) -> bool:
        if not self._finished:
            self._complete(self._handle.Test)
        return self._finished

    def wait(self) -> None:
        if not self._finished:
            self._complete(self._handle.Wait)
        if self._error is not None:
            raise RuntimeError(self._error)

    def _complete(self, ask: Callable[[MPI.Status], object]) -> None:
        status = self._mpi.Status()
        try:
            self._finished = ask(status) is not False
        except self._mpi.Exception as error:
            self._finished = True
            too_long = error.Get_error_class() == self._mpi.ERR_TRUNCATE
            self._error = (
                _mismatch(self._what, None, self._wire.nbytes) if too_long else f"{self._what}: {error}"
            )
            return
        if not self._finished or self._target is None:
            return
        got = status.Get_count(self._mpi.BYTE)
        if got != self._wire.nbytes:
            self._error = _mismatch(self._what, got, self._wire.nbytes)
        else:
            _write_back(self._target, self._wire)


def _elements(wire: torch.Tensor) -> Any:
    """Return a buffer of typed elements rather than bytes, as reductions need."""
    return wire.view(-1).numpy()


def _mismatch(what: str, got: int | None, expected: int) -> str:
    sent = "more" if got is None else str(got)
    return f"{what}: tensor sizes do not match: {sent} bytes were sent, {expected} are expected"


def _spread(landing: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy the rows of ``landing`` to the tensors of ``outputs``."""
    for row, output in zip(landing, outputs, strict=True):
        output.detach().copy_(row.view(output.shape))


def _write_back(tensor: torch.Tensor, wire: torch.Tensor) -> None:
    if wire.data_ptr() != tensor.data_ptr() or tensor.is_cuda:
        tensor.detach().copy_(wire.view(tensor.shape))
