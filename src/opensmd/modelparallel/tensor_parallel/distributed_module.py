"""``smp.nn.DistributedModule``: the base of modules with parameters split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from opensmd.modelparallel.ranks.shards import Shard, ShardedModule, bounds
from opensmd.modelparallel.tensor_parallel import collectives
from opensmd.modelparallel.tensor_parallel.tensor_group import batch_is_shared, tensor_rank, tensor_size

__all__ = [
    "BatchGather",
    "BatchScatter",
    "DistributedModule",
    "mark_outermost",
    "outermost",
    "split_parameter",
]


class DistributedModule(ShardedModule):
    """A module that the ranks of a tensor-parallel group compute together.

    Its inputs and outputs are the same on all of them. Without ``prescaled_batch``, every rank has its own
    batch: an outermost distributed module gathers them with :meth:`gather_batch` and returns every rank's own
    part with :meth:`scatter_batch`.

    Register split parameters with :meth:`split_parameter`; all others must be used in the same way on all
    ranks.

    Attributes:
        is_outermost: whether no other distributed module contains it; set by ``smp.DistributedModel``.
        place: its name in the model; set with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_outermost = True
        self.place = ""

    @property
    def scales_batch(self) -> bool:
        """Whether it must gather the ranks' batches."""
        return self.is_outermost and not batch_is_shared()

    def split_parameter(self, name: str, whole: Tensor, axis: int) -> nn.Parameter:
        """Register this rank's slice of ``whole`` as the parameter ``name``, and return it."""
        return split_parameter(self, name, whole, axis)

    def gather_batch(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' batches along axis 0, if they differ."""
        return collectives.gather_batch(tensor, self.place) if self.scales_batch else tensor

    def scatter_batch(self, tensor: Tensor) -> Tensor:
        """Return the part of an output for this rank's own batch."""
        return collectives.scatter_batch(tensor) if self.scales_batch else tensor


class BatchGather(nn.Module):
    """:func:`gather_batch` as a module, for modules that a pipeline may run piece by piece."""

    place = ""  # its name in the model

    def forward(self, tensor: Tensor) -> Tensor:
        """Return all ranks' batches."""
        return collectives.gather_batch(tensor, self.place)


class BatchScatter(nn.Module):
    """:func:`scatter_batch` as a module."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Return this rank's part."""
        return collectives.scatter_batch(tensor)


def split_parameter(module: ShardedModule, name: str, whole: Tensor, axis: int) -> nn.Parameter:
    """Register this rank's slice of ``whole`` as a parameter of ``module``."""
    start, stop = bounds(whole.shape[axis], tensor_size(), tensor_rank())
    own = whole.detach().narrow(axis, start, stop - start)
    # a copy, so that the whole tensor's memory is freed
    parameter = nn.Parameter(own.clone(memory_format=torch.contiguous_format) if tensor_size() > 1 else own)
    module.register_parameter(name, parameter)
    if tensor_size() > 1:
        module.shards[name] = Shard(axis, whole.shape[axis])
    return parameter


def outermost(module: nn.Module) -> Iterator[tuple[str, DistributedModule]]:
    """Return the outermost distributed modules, by full name."""
    inner: set[nn.Module] = set()
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedModule) and submodule not in inner:
            inner.update(submodule.modules())
            yield name, submodule


def mark_outermost(module: nn.Module) -> None:
    """Let every distributed module below ``module`` know whether it is in another one, and where."""
    top = {distributed for _, distributed in outermost(module)}
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedModule):
            submodule.is_outermost = submodule in top
        if isinstance(submodule, DistributedModule | BatchGather):
            submodule.place = name
