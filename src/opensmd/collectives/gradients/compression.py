"""Compressing DDP's gradients between hosts: a communication hook and its state.

A bucket is added up in full precision in the shared memory of each host; only between hosts do values travel
as bf16, fp16 or int8 (csrc/torch/hosts/levels/coding.hpp). All ranks end with the same bits. With error
feedback, each rank keeps the errors it has seen and adds them to its next gradients; which rank keeps an
error does not matter, because all are added up. So residuals belong to parameters, and survive every rebuild
of the buckets.

No postponed annotations here, because DDP compares a hook's annotations with its own types.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from opensmd.collectives import _torch_internals
from opensmd.collectives.name import NAME
from opensmd.environment.settings import COMPRESSIONS
from opensmd.said_once import warn_once

__all__ = ["CompressionState", "compression_hook"]

# These do not make narrow floats narrower.
_AS_NARROW = {"bf16": (torch.bfloat16, torch.float16), "fp16": (torch.bfloat16, torch.float16)}


class CompressionState:
    """How the gradients of a wrapped model travel between hosts, and the errors so far.

    Pass it to ``register_comm_hook`` of DDP or ``smp.DistributedModel``, with :func:`compression_hook`.

    Args:
        compression: "bf16", "fp16" or "int8" (one byte per value and a float32 scale per 256 values).
        process_group: the replicas' group, with backend smddp; None for the default group. With model
            parallelism, ``smp.get_dp_process_group()``.
        error_feedback: whether to add errors to the next gradients; by default only with int8. This takes as
            much memory as the gradients.

    Raises:
        ValueError: the compression is unknown.
    """

    def __init__(
        self,
        compression: str,
        process_group: dist.ProcessGroup | None = None,
        *,
        error_feedback: bool | None = None,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression={compression!r}: expected one of {', '.join(COMPRESSIONS)}")
        self.compression = compression
        self.process_group = process_group
        self.error_feedback = compression == "int8" if error_feedback is None else error_feedback
        self._residuals = WeakTensorKeyDictionary()  # by parameter; views of their bucket's residual
        self._buckets: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the pending errors of this rank's gradients of ``model``, by parameter name.

        Each rank has its own. Without them, a run continues as if the last step had been sent exactly.
        """
        return {
            name: self._residuals[parameter].clone().view_as(parameter)
            for name, parameter in model.named_parameters()
            if parameter in self._residuals
        }

    def load_state_dict(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Continue with what :meth:`state_dict` returned for a model with the same names.

        Raises:
            ValueError: a name or shape is not the model's; nothing is loaded then.
        """
        parameters = dict(model.named_parameters())
        for name, residual in saved.items():
            if name not in parameters or parameters[name].shape != residual.shape:
                shape = (
                    f"shape {tuple(parameters[name].shape)}" if name in parameters else "none of this name"
                )
                raise ValueError(
                    f"the residual of {name!r} has shape {tuple(residual.shape)}, but the model has {shape}. "
                    "Load what state_dict() of a model with the same parameters gave"
                )
        self._buckets.clear()
        self._residuals.clear()
        for name, residual in saved.items():
            self._residuals[parameters[name]] = residual.detach().clone().view(-1)

    def residual_of(self, index: int, parameters: Sequence[Tensor]) -> Tensor:
        """Return a bucket's flat residual, with what is known about its parameters; used by the hook."""
        identity = tuple(map(id, parameters))
        known, residual = self._buckets.get(index, ((), None))
        if residual is None or known != identity:  # also after DDP has rebuilt its buckets
            residual = self._joined(parameters)
            for parameter, view in zip(parameters, torch.split(residual, _sizes(parameters)), strict=True):
                self._residuals[parameter] = view
            self._buckets[index] = identity, residual
        return residual

    def take_residual(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Remove and return what is known about a bucket's parameters; None if nothing is."""
        if not any(parameter in self._residuals for parameter in parameters):
            return None
        residual = self._joined(parameters)
        for parameter in parameters:
            if parameter in self._residuals:
                del self._residuals[parameter]
        self._buckets.clear()
        return residual

    def _joined(self, parameters: Sequence[Tensor]) -> Tensor:
        joined = torch.zeros(sum(_sizes(parameters)), device="cpu")
        for parameter, piece in zip(parameters, torch.split(joined, _sizes(parameters)), strict=True):
            if parameter in self._residuals:
                piece.copy_(self._residuals[parameter])
        return joined


def compression_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the replicas, compressed between hosts.

    If all replicas are on one host, or the bucket is already as narrow (bf16 and fp16), this is torch's
    ``allreduce_hook`` and exact.

    Raises:
        ValueError: the group's backend is not smddp.
        TypeError: the gradients have a type that is not compressed, or the state is invalid.
        NotImplementedError: the gradients are not on the CPU.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(
            f"compression_hook got {state!r} for its state: call "
            'register_comm_hook(CompressionState("int8"), compression_hook)'
        )
    buffer = bucket.buffer()
    if not _loses(state, buffer):
        return _exactly(state, bucket)
    residual = state.residual_of(bucket.index(), bucket.parameters()) if state.error_feedback else None
    work = _torch_internals.cpu_backend(state.process_group).all_reduce_compressed(
        buffer, average=True, compression=state.compression, residual=residual
    )
    return work.get_future().then(_first)  # type: ignore[no-any-return]


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _exactly(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    lost = state.take_residual(bucket.parameters())  # saved from a run on several hosts
    if lost is not None:
        bucket.buffer().add_(lost)
    return default_hooks.allreduce_hook(state.process_group or _torch_internals.default_group(), bucket)


def _loses(state: CompressionState, buffer: Tensor) -> bool:
    """Whether a bucket is compressed.

    Raises:
        ValueError, TypeError: the bucket cannot be compressed.
    """
    group = state.process_group or _torch_internals.default_group()
    backend: Any = _torch_internals.cpu_backend(group)
    name = dist.get_backend(group)
    if not hasattr(backend, "all_reduce_compressed"):
        if name != NAME:
            raise ValueError(
                f"only the backend smddp compresses gradients between hosts, but group {group.group_name!r} "
                f"has the backend {name!r}: use a group of smddp, or no hook"
            )
        warn_once(
            "smddp: gradients are not compressed between hosts, because Gloo serves the group instead of the "
            "native core",
            RuntimeWarning,
        )
        return False
    if not backend.spans_hosts() or buffer.dtype in _AS_NARROW.get(state.compression, ()):
        return False
    if buffer.dtype != torch.float32:
        raise TypeError(
            f"only float32 gradients are compressed to {state.compression} between hosts, but these are "
            f"{buffer.dtype}. Use float32 parameters, or no hook"
        )
    return True


def _sizes(parameters: Sequence[Tensor]) -> list[int]:
    return [parameter.numel() for parameter in parameters]
