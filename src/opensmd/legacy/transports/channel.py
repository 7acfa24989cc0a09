"""The collectives of one group, over a private process group of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch

from opensmd.legacy import _torch_internals as c10d
from opensmd.legacy.names import reduce_op
from opensmd.legacy.transports.base import Channel
from opensmd.legacy.transports.engine import WIRES

__all__ = ["TorchChannel"]

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
        landings = self._landings(outputs)
        options = _options(c10d.AllgatherOptions)
        self._run(
            "all_gather", self._group.allgather, [self._all_moved(landings)], [self._moved(tensor)], options
        )
        _write_all_back(outputs, landings)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        landings = self._landings(outputs) if outputs else []
        moved = [self._all_moved(landings)] if outputs else []
        options = _options(c10d.GatherOptions, root)
        self._run("gather", self._group.gather, moved, [self._moved(tensor)], options)
        if outputs:
            _write_all_back(outputs, landings)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        landing = self._landing(tensor, read=False)
        moved = [[self._moved(input) for input in inputs]] if inputs else []
        options = _options(c10d.ScatterOptions, root)
        self._run("scatter", self._group.scatter, [self._wire.moved(landing)], moved, options)
        _write_back(tensor, landing)

    def barrier(self) -> None:
        if self._wire.device == "cuda":
            # NCCL's own barrier guesses a device; this is the caller's.
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
        """Return what the engine sends for ``tensor``."""
        if self._wire.takes(tensor, reducing=False):
            return tensor
        return self._wire.moved(self._wire.for_moving(tensor))

    def _landings(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return where the engine can put the tensors' results; the same sequence if it can use all."""
        for tensor in tensors:
            if not self._wire.is_here(tensor):
                return [self._landing(part, read=False) for part in tensors]
        return tensors

    def _all_moved(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of one dtype as the engine can move them."""
        return list(tensors) if self._wire.moves_all else [self._wire.moved(tensor) for tensor in tensors]

    def _landing(self, tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
        """Return contiguous memory for the engine's result for ``tensor``; perhaps the tensor itself."""
        if self._wire.is_here(tensor):
            return tensor
        if read:
            return self._wire.for_moving(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._wire.place(tensor))


def _write_back(tensor: torch.Tensor, wire: torch.Tensor) -> None:
    if wire is not tensor:
        tensor.detach().copy_(wire)


def _write_all_back(tensors: Sequence[torch.Tensor], wires: Sequence[torch.Tensor]) -> None:
    if wires is tensors:
        return
    for tensor, wire in zip(tensors, wires, strict=True):
        _write_back(tensor, wire)


@cache
def _options(kind: type[T], root: int | None = None, op: reduce_op | None = None) -> T:
    """Options of a blocking call, created once because that costs as much as a small collective."""
    options: Any = kind()
    options.asyncOp = False
    if root is not None:
        options.rootRank = root
    if op is not None:
        options.reduceOp = _OPS[op]
    return cast(T, options)
