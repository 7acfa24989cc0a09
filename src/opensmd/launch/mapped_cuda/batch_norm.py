"""``torch.nn.SyncBatchNorm`` on the CPU; torch has it only for accelerators.

As there, each rank sends the others the mean, the squared deviations and the size of its own batch, and in
backward the two sums over its gradient. Batches may have different sizes, or be empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from opensmd.upcast import upcast

__all__ = ["normalize_together"]


def normalize_together(layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """``SyncBatchNorm.forward``: in training, normalize by the statistics of all ranks' batches."""
    layer._check_input_dim(input)
    layer._check_non_zero_input_channels(input)
    together = layer.training and dist.is_initialized()
    group = (layer.process_group or dist.group.WORLD) if together else None
    if group is None or dist.get_world_size(group) == 1:
        return _BatchNorm.forward(layer, input)
    result: Tensor = _Together.apply(  # type: ignore[no-untyped-call]
        input, layer.weight, layer.bias, layer, group
    )
    return result


class _Together(torch.autograd.Function):
    """Normalizes this rank's part of a batch; channels are dimension 1."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: nn.SyncBatchNorm,
        group: Any,
    ) -> Tensor:
        exact = upcast(batch)
        count, mean, deviations = _of_all(_own_statistics(exact), group)
        _keep_track(layer, mean, deviations, count)
        scale = (deviations / count + layer.eps).rsqrt()
        ctx.save_for_backward(batch, weight, mean, scale, count)
        ctx.group, ctx.shift_type = group, None if bias is None else bias.dtype
        result = (exact - _along(mean, batch)) * _along(scale, batch)
        if weight is not None:
            result = result * _along(weight, batch)
        if bias is not None:
            result = result + _along(bias, batch)
        return result.to(batch.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        batch, weight, mean, scale, count = ctx.saved_tensors
        exact = upcast(gradient)
        normal = (upcast(batch) - _along(mean, batch)) * _along(scale, batch)
        rows = [dim for dim in range(batch.dim()) if dim != 1]
        sums = torch.stack([exact.sum(rows), (exact * normal).sum(rows)])
        of_bias, of_weight = sums
        of_batch = None
        if ctx.needs_input_grad[0]:
            whole = sums.clone()
            dist.all_reduce(whole, group=ctx.group)
            first, second = whole / count
            factor = scale if weight is None else scale * weight
            of_batch = (exact - _along(first, batch) - normal * _along(second, batch)) * _along(factor, batch)
            of_batch = of_batch.to(batch.dtype)
        return (
            of_batch,
            None if weight is None else of_weight.to(weight.dtype),
            None if ctx.shift_type is None else of_bias.to(ctx.shift_type),
            None,
            None,
        )


def _along(channels: Tensor, batch: Tensor) -> Tensor:
    """Reshape one number per channel for broadcasting over a batch."""
    return channels.view(1, -1, *[1] * (batch.dim() - 2))


def _own_statistics(batch: Tensor) -> Tensor:
    """Return what the others need: the number of values, and per channel mean and squared deviations."""
    values = batch.transpose(0, 1).flatten(1)
    count = values.shape[1]
    mean = values.mean(1) if count else values.sum(1)
    deviations = (values - mean[:, None]).square().sum(1)
    return torch.cat([mean.new_full((1,), count), mean, deviations])


def _of_all(own: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return number of values, mean and squared deviations of all batches, identical on each rank."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered)
    counts = table[:, :1]
    means, deviations = table[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (deviations + counts * (means - mean).square()).sum(0)


def _keep_track(layer: nn.SyncBatchNorm, mean: Tensor, deviations: Tensor, count: Tensor) -> None:
    """Move the layer's running statistics, if it has any, towards those of this batch."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    weight = layer.momentum
    if weight is None:
        weight = 1 / int(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), weight)
    layer.running_var.lerp_((deviations / (count - 1)).to(layer.running_var.dtype), weight)
