"""Which slice of a tensor each rank has, and whole tensors from slices; pure except for the group's size."""

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
        axis: the axis it is split along.
        size: the whole tensor's size along it.
    """

    axis: int
    size: int

    def cut(self, whole: Tensor, parts: int, rank: int) -> Tensor:
        """Return a rank's slice of the whole tensor, as a view."""
        start, stop = bounds(self.size, parts, rank)
        return whole.narrow(self.axis, start, stop - start)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the whole tensor, given the shape of a rank's slice."""
        return torch.Size((*part[: self.axis], self.size, *part[self.axis + 1 :]))


class ShardedModule(nn.Module):
    """A module that may have parameters split over the tensor-parallel group.

    Attributes:
        shards: its own split parameters and buffers, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shard] = {}


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's local tensor of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bounds(size: int, parts: int, rank: int) -> tuple[int, int]:
    """Return where a rank's slice of ``size`` entries begins and ends; as in chunk, the last are shorter."""
    longest = -(-size // parts)
    return min(rank * longest, size), min((rank + 1) * longest, size)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return split parameters and buffers of a module and its submodules by all their full names."""
    return dict(_named_shards(module))


def _named_shards(module: nn.Module) -> Iterator[tuple[str, Shard]]:
    for name, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, ShardedModule):
            for own, shard in submodule.shards.items():
                yield f"{name}.{own}" if name else own, shard
