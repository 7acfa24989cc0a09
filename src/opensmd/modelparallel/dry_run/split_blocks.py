"""Blocks that torch's own tensor parallelism (``parallelize_module``) has split.

Between their modules go distributed tensors, which do not go from one stage to another; and running one needs
all ranks that share it, so that the first rank alone cannot try it.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["split_blocks"]


def split_blocks(module: nn.Module) -> frozenset[str]:
    """The modules right around those that have distributed parameters, by name."""
    return frozenset(
        name.rpartition(".")[0]
        for name, submodule in module.named_modules()
        if any(isinstance(own, DTensor) for own in submodule.parameters(recurse=False))
    )
