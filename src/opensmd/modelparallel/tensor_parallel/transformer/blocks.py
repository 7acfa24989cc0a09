"""The common parts of a distributed transformer's blocks: batches at the border, residuals, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.tensor_parallel.distributed_module import (
    BatchGather,
    BatchScatter,
    DistributedModule,
)
from opensmd.modelparallel.tensor_parallel.transformer.options import LayerOptions
from opensmd.upcast import upcast

__all__ = ["Block", "add", "norm"]


class Block(DistributedModule):
    """A distributed module made of others, so that a pipeline may run it piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_gather = BatchGather()
        self.batch_scatter = BatchScatter()

    def enter(self, inputs: Sequence[Any]) -> list[Any]:
        """Gather inputs for the batches of all ranks; what has no batch (one entry or axis) is unchanged."""
        if not self.scales_batch:
            return list(inputs)
        batch = inputs[0].shape[0]
        return [
            self.batch_gather(input)
            if isinstance(input, Tensor) and input.dim() > 1 and input.shape[0] == batch
            else input
            for input in inputs
        ]

    def leave(self, output: Tensor) -> Tensor:
        """Return this rank's part of an output."""
        if not self.scales_batch:
            return output
        own: Tensor = self.batch_scatter(output)
        return own


def norm(options: LayerOptions, *, wanted: bool) -> nn.LayerNorm | None:
    """Return a layer normalisation, if ``wanted``."""
    return nn.LayerNorm(options.hidden_size, eps=options.layernorm_epsilon) if wanted else None


def add(residual: Tensor, output: Tensor, options: LayerOptions) -> Tensor:
    """Return the sum, in float32 if configured."""
    if options.fp32_residual_addition:
        return (upcast(residual) + upcast(output)).to(output.dtype)
    return residual + output
