"""Equal slices of flattened tensors: which one a rank has, and whole tensors from all slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.collectives.gradients.flat import in_buckets
from opensmd.modelparallel.ranks.gathered import newly_gathered
from opensmd.modelparallel.ranks.spread import spread_over

__all__ = ["Rows", "Slicing", "gather_parameters", "gathered"]

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Slicing:
    """The number of ranks that vectors are split over, and which of them this is."""

    ranks: int
    rank: int

    def length(self, elements: int) -> int:
        """Return the elements of a slice; the last ones may be shorter, or empty."""
        return -(-elements // self.ranks)

    def lengths(self, elements: int) -> list[int]:
        """Return the elements of every rank's slice."""
        length = self.length(elements)
        return [max(0, min(length, elements - rank * length)) for rank in range(self.ranks)]

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice; a view if the tensor is contiguous."""
        vector, length = tensor.reshape(-1), self.length(tensor.numel())
        return vector[self.rank * length : (self.rank + 1) * length]

    def padded(self, own: Tensor, elements: int) -> Tensor:
        """Return a slice padded to full length, as it travels."""
        whole = own.new_zeros(self.length(elements))
        whole[: own.numel()] = own
        return whole


@dataclass(frozen=True)
class Rows:
    """Tensors split over ranks by rows, as in FSDP2: the last ranks may have fewer, or none."""

    ranks: int
    rank: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows."""
        rows = tensor.shape[0]
        share = -(-rows // self.ranks)
        first = min(self.rank * share, rows)
        return tensor.narrow(0, first, min(share, rows - first))

    def whole(self, own: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
        """Gather all rows; all ranks of ``group`` must call."""
        share = -(-shape[0] // self.ranks)
        rows = Slicing(self.ranks, self.rank).lengths(shape[0])
        if (spread := spread_over(own, shape, [each * shape[1:].numel() for each in rows])) is not None:
            return spread
        mine = own.new_zeros((share, *shape[1:]))
        mine[: own.shape[0]] = own.detach()
        everyone = mine.new_empty((share * self.ranks, *shape[1:]))
        dist.all_gather_single(everyone, mine, group=group)
        return newly_gathered(everyone[: shape[0]])


def gathered(own: Tensor, shape: torch.Size, slicing: Slicing, group: dist.ProcessGroup) -> Tensor:
    """Gather a whole tensor from the slices of all ranks of ``group``, which must all call."""
    if (spread := spread_over(own, shape, slicing.lengths(shape.numel()))) is not None:
        return spread
    mine = slicing.padded(own, shape.numel())
    everyone = mine.new_empty(mine.numel() * slicing.ranks)
    dist.all_gather_single(everyone, mine, group=group)
    return newly_gathered(everyone[: shape.numel()].view(shape))


def gather_parameters(parameters: Sequence[nn.Parameter], slicing: Slicing, group: dist.ProcessGroup) -> None:
    """Complete every parameter from the slices of all ranks of ``group``, which must all call."""
    for bucket in in_buckets(parameters, BUCKET_BYTES):
        mine = torch.cat(
            [slicing.padded(slicing.cut(parameter.detach()), parameter.numel()) for parameter in bucket]
        )
        everyone = mine.new_empty(mine.numel() * slicing.ranks)
        dist.all_gather_single(everyone, mine, group=group)
        rows, first = everyone.view(slicing.ranks, -1), 0
        for parameter in bucket:
            length = slicing.length(parameter.numel())
            whole = rows[:, first : first + length].reshape(-1)[: parameter.numel()]
            parameter.detach().copy_(whole.view(parameter.shape))
            first += length
