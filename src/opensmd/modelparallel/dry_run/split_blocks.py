"""Blocks that torch's own tensor parallelism (``parallelize_module``) has split.

Distributed tensors pass between their modules, and cannot cross stages. Running such a block needs all ranks
that share it, so the first rank cannot try it alone.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["split_blocks"]


def split_blocks(module: nn.Module) -> frozenset[str]:
    """Return the direct parents of modules with distributed parameters, by name."""
    return frozenset(
        name.rpartition(".")[0]
        for name, submodule in module.named_modules()
        if any(isinstance(own, DTensor) for own in submodule.parameters(recurse=False))
    )
