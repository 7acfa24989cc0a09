"""``smp.nn.DistributedLayerNorm``: layer normalisation over features split over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opensmd.modelparallel.tensor_parallel.collectives import sum_for_split
from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule
from opensmd.modelparallel.tensor_parallel.layers.linear import require_divisible
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_size
from opensmd.upcast import upcast

__all__ = ["DistributedLayerNorm"]


class DistributedLayerNorm(DistributedModule):
    """Layer normalisation in which each rank has a slice of the features.

    Args:
        normalized_shape: the total number of features; the number of ranks must divide it.
        eps: added to the variance.
        elementwise_affine: learn a weight and a bias, split like the features.

    Raises:
        ValueError: the number of ranks does not divide ``normalized_shape``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__()
        require_divisible("smp.nn.DistributedLayerNorm", normalized_shape=normalized_shape)
        self.normalized_shape, self.eps = normalized_shape, eps
        if elementwise_affine:
            self.split_parameter("weight", torch.ones(normalized_shape), 0)
            self.split_parameter("bias", torch.zeros(normalized_shape), 0)
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., this rank's features]``, normalised over all ranks' features."""
        if tensor_size() == 1:
            return nn.functional.layer_norm(input, [self.normalized_shape], self.weight, self.bias, self.eps)
        wide = upcast(input)
        centred = wide - self._mean(wide)
        output = centred * torch.rsqrt(self._mean(centred.square()) + self.eps)
        output = output.to(input.dtype)
        if self.weight is None or self.bias is None:
            return output
        return output * self.weight + self.bias

    def _mean(self, own: Tensor) -> Tensor:
        return sum_for_split(own.sum(-1, keepdim=True)) / self.normalized_shape
