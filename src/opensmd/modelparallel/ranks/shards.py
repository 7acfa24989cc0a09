"""Which slice of a tensor each rank has, and whole tensors from slices; pure but for the group's size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Shard", "ShardedModule", "bounds", "local_part", "shards_of"]


@dataclass(frozen=True)
class Shard:
    """How a tensor is split.

    Attributes:
        axis: along which.
        size: of the whole tensor along it.
    """

    axis: int
    size: int

    def cut(self, whole: Tensor, parts: int, rank: int) -> Tensor:
        """A rank's slice of the whole tensor, as a view."""
        start, stop = bounds(self.size, parts, rank)
        return whole.narrow(self.axis, start, stop - start)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """The shape of the whole of which a rank has a slice of shape ``part``."""
        return torch.Size((*part[: self.axis], self.size, *part[self.axis + 1 :]))


class ShardedModule(nn.Module):
    """A module that may have parameters of which each rank of the tensor-parallel group has a slice.

    Attributes:
        shards: its own split parameters and buffers, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shard] = {}


def local_part(tensor: Tensor) -> Tensor:
    """The memory of a tensor that this rank has: of torch's distributed tensors, the local one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bounds(size: int, parts: int, rank: int) -> tuple[int, int]:
    """Where a rank's slice of ``size`` entries begins and ends; the last slices are shorter, as chunk's."""
    longest = -(-size // parts)
    return min(rank * longest, size), min((rank + 1) * longest, size)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """The split parameters and buffers of a module and all below it, by full name; tied ones by each."""
    return dict(_named_shards(module))


def _named_shards(module: nn.Module) -> Iterator[tuple[str, Shard]]:
    for name, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, ShardedModule):
            for own, shard in submodule.shards.items():
                yield f"{name}.{own}" if name else own, shard
