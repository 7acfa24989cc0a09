"""The table's kind of an operation, and what counts as its elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cpu.sizes import size_of

__all__ = ["Counted", "counted"]

_aten = torch.ops.aten
VECTOR = 8  # elements of an image that a norm computes together
_GELU = {_aten.gelu, _aten.gelu_}


class Counted(NamedTuple):
    """An operation in terms of the table.

    Attributes:
        kind: the table's kind.
        elements: those that the rates apply to.
        rows: the rows of elements.
        backward_bytes: additional bytes that its backward writes.
        reads_all: whether it reads all of its arguments.
        passes_on: to how many of its arguments its backward only passes the gradient on.
    """

    kind: str
    elements: float
    rows: float = 0.0
    backward_bytes: float = 0.0
    reads_all: bool = True
    passes_on: int = 0


def counted(
    packet: torch._ops.OpOverloadPacket,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    result: Tensor,
) -> Counted:
    """Classify the operation ``packet`` with ``args``, which contain ``tensors``, and this (first) result."""
    if packet in _GELU:
        by_tangent = kwargs.get("approximate") == "tanh"
        return Counted("GELU by tangent" if by_tangent else "exponential", result.numel())
    count = _COUNTS.get(packet)
    if count is not None and tensors:  # a number can be copied, too
        return count(args, tensors, result)
    kind = _KINDS.get(packet, "arithmetic")
    return Counted(kind, max(result.numel(), *(tensor.numel() for tensor in tensors), 0))


_OF_KIND: dict[str, tuple[str, ...]] = {
    "exponential": ("exp", "exp_", "log", "log1p", "expm1", "sigmoid", "sigmoid_", "silu", "silu_", "log2"),
    "tangent": ("tanh", "tanh_", "sin", "cos", "softplus", "elu", "elu_", "erf", "celu", "pow_"),
    "mish": ("mish", "mish_"),
    "random": ("native_dropout", "bernoulli", "bernoulli_", "normal_", "randn", "randn_like", "rand_like"),
    "mask": ("where", "masked_fill", "masked_fill_"),
    "moved copy": ("constant_pad_nd", "reflection_pad2d", "reflection_pad1d", "roll", "replication_pad2d"),
    "softmax": ("_softmax", "_log_softmax", "logsumexp"),
    "softmax of masked rows": ("_safe_softmax",),
    "mean": ("mean", "sum", "nansum"),
    "extreme": ("amax", "amin", "max", "min", "linalg_vector_norm", "norm", "prod"),
    "variance": ("var", "var_mean", "std", "std_mean"),
    "running sum": ("cumsum", "cumsum_", "cumprod", "logcumsumexp", "cummax"),
    "sort": ("sort", "argsort"),
    "largest of a row": ("topk",),
    "gather": ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_put"),
}
_KINDS = {
    getattr(_aten, name): kind for kind, names in _OF_KIND.items() for name in names if hasattr(_aten, name)
}


def _clone(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return _copy(args, tensors, result)._replace(passes_on=1)


def _joined(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("arithmetic", result.numel(), passes_on=len(tensors))


def _copy(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    """Classify a copy; it reorders if it does not read adjacent elements, as after a transposition."""
    source = tensors[-1]
    crosswise = source.dim() > 1 and source.stride(-1) not in (0, 1) and source.shape[-1] > 1
    return Counted("transposed copy" if crosswise else "arithmetic", result.numel())


def _layer_norm(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("layer norm", result.numel(), result.numel() / math.prod(args[1]))


def _group_norm(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("group norm", result.numel())


def _batch_norm(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    training = args[5] if len(args) > 5 and isinstance(args[5], bool) else True
    if not training:
        return _fixed_batch_norm(args, tensors, result)
    pixels = math.prod(result.shape[2:])
    few = pixels < VECTOR  # too few to be computed together
    return Counted("batch norm of few pixels" if few else "batch norm", result.numel())


def _fixed_batch_norm(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("fixed batch norm", result.numel())


def _from_table(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("rows of a table", result.numel(), backward_bytes=size_of(tensors[0]), reads_all=False)


def _indexed(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("index", result.numel(), backward_bytes=size_of(tensors[0]), reads_all=False)


def _pooled(kind: str) -> Callable[[Sequence[Any], Sequence[Tensor], Tensor], Counted]:
    def count(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
        kernel = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        sides = result.dim() - 2
        window = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** sides
        return Counted(kind, result.numel() * window)

    return count


def _adaptive(args: Sequence[Any], tensors: Sequence[Tensor], result: Tensor) -> Counted:
    return Counted("mean of windows", max(result.numel(), tensors[0].numel()))


def _of_result(kind: str) -> Callable[[Sequence[Any], Sequence[Tensor], Tensor], Counted]:
    return lambda args, tensors, result: Counted(kind, result.numel())


_COUNTS: dict[Any, Callable[[Sequence[Any], Sequence[Tensor], Tensor], Counted]] = {
    _aten.clone: _clone,
    _aten.cat: _joined,
    _aten.stack: _joined,
    _aten.copy_: _copy,
    _aten._to_copy: _copy,
    _aten.native_layer_norm: _layer_norm,
    _aten.native_group_norm: _group_norm,
    _aten.native_batch_norm: _batch_norm,
    _aten._native_batch_norm_legit: _batch_norm,
    _aten._native_batch_norm_legit_no_training: _fixed_batch_norm,
    _aten.embedding: _from_table,
    _aten.index_select: _from_table,
    _aten.index: _indexed,
    _aten.max_pool2d_with_indices: _pooled("maximum of windows"),
    _aten.max_pool3d_with_indices: _pooled("maximum of windows"),
    _aten.avg_pool2d: _pooled("mean of windows"),
    _aten.avg_pool3d: _pooled("mean of windows"),
    _aten._adaptive_avg_pool2d: _adaptive,
    _aten.upsample_nearest2d: _of_result("nearest pixels"),
    _aten.upsample_bilinear2d: _of_result("mixed pixels"),
    _aten._upsample_bilinear2d_aa: _of_result("mixed pixels"),
    _aten.upsample_bicubic2d: _of_result("cubic pixels"),
    _aten._upsample_bicubic2d_aa: _of_result("cubic pixels"),
}
