"""The cost of an operation, estimated only from shapes, so that it is the same on every run and machine.

On a CPU core, each kind of operation has its own rates (:mod:`.cpu.rates`); a GPU has those of
:mod:`.gpu`. If they do not fit a model, ``trace_execution_times`` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from opensmd.modelparallel.planning.costs.cpu.cost import operation_seconds
from opensmd.modelparallel.planning.costs.cpu.rates import ACCUMULATION
from opensmd.modelparallel.planning.costs.cpu.views import view_seconds
from opensmd.modelparallel.planning.costs.gpu import gpu_accumulation_seconds, gpu_operation_seconds

__all__ = [
    "CPU",
    "Machine",
    "OperationCost",
    "accumulation_seconds",
    "cost_of",
    "optimizer_state_ratio",
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device's rates: bytes per second, and seconds to start an operation."""

    bytes: float
    start: float


# one core, beyond the caches; for sums over a whole model
CPU = Machine(bytes=10e9, start=4e-6)


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """Arithmetic and seconds of an operation and its backward."""

    flops: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


def cost_of(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    *,
    needs_gradient: bool,
) -> OperationCost:
    """Return the cost of one aten operation, given its tensors (real or fake; only shapes are read)."""
    tensors = list(_tensors((args, kwargs)))
    results = list(_tensors(out))
    if not results:
        return OperationCost()
    if _is_view(func):
        return _cost_of_view(func, tensors, results, needs_gradient=needs_gradient)
    packet = func.overloadpacket
    flops = _flops(packet, args, kwargs, out)
    if results[0].is_cuda:
        forward, backward = gpu_operation_seconds(
            packet, tensors, results, flops=flops, needs_gradient=needs_gradient
        )
    else:
        forward, backward = operation_seconds(
            packet, args, kwargs, tensors, results[0], flops=flops, needs_gradient=needs_gradient
        )
    return OperationCost(flops=flops, forward_seconds=forward, backward_seconds=backward)


def _cost_of_view(
    func: torch._ops.OpOverload,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    needs_gradient: bool,
) -> OperationCost:
    moves_nothing = func.overloadpacket in _FREE and func.overloadpacket is not torch.ops.aten._unsafe_view
    if moves_nothing or not tensors or results[0].is_cuda:
        return OperationCost()
    forward, backward = view_seconds(func.overloadpacket, tensors[0], results, needs_gradient)
    return OperationCost(forward_seconds=forward, backward_seconds=backward)


def accumulation_seconds(size: int, device: torch.device, *, begun: bool = False) -> float:
    """Return the time to add one microbatch's gradient to the previous ones.

    Args:
        size: in bytes.
        device: where that happens.
        begun: leave out the cost of starting.
    """
    if device.type == "cuda":
        return gpu_accumulation_seconds(size)
    rate, start = ACCUMULATION
    return 3.0 * size / rate + (0.0 if begun else start)


def optimizer_state_ratio(optimizer: torch.optim.Optimizer | None, *, masters: bool = False) -> float:
    """Return bytes of optimizer state per byte of parameters; 2 (as for Adam) if unknown.

    Args:
        masters: whether parameters have 16 bits, and the optimizer FP32 copies with FP32 gradients.
    """
    ratio = _state_ratio(optimizer)
    return 2 * (2 + ratio) if masters else ratio


def _state_ratio(optimizer: torch.optim.Optimizer | None) -> float:
    if optimizer is None:
        return 2.0
    defaults = optimizer.defaults
    kind = type(optimizer).__name__
    if kind == "SGD":
        return 1.0 if defaults.get("momentum") else 0.0
    if kind in {"Adagrad", "Lion"}:
        return 1.0
    return 3.0 if defaults.get("amsgrad") else 2.0


def _is_view(func: torch._ops.OpOverload) -> bool:
    return func.is_view or func.overloadpacket in _FREE


_FREE = {
    torch.ops.aten.detach,
    torch.ops.aten.lift_fresh,
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
}


def _flops(
    packet: torch._ops.OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> float:
    formula = _MORE_FLOPS.get(packet)
    if formula is not None:
        return formula(*args)
    registered = flop_registry.get(packet)
    return float(registered(*args, **kwargs, out_val=out)) if registered is not None else 0.0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    batch, heads, length, width = query.shape
    return 2.0 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def _rnn_flops(inputs: torch.Tensor, in_weight: torch.Tensor, state_weight: torch.Tensor, *_: Any) -> float:
    return 2.0 * inputs.shape[0] * inputs.shape[1] * (in_weight.numel() + state_weight.numel())


# products missing from torch's own registry because they only exist on the CPU
_MORE_FLOPS: dict[Any, Callable[..., float]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _rnn_flops,
}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
