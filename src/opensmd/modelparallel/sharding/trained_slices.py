"""The part of a shared parameter that an optimizer trains on this rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.ranks.slices import Rows, Slicing, gathered
from opensmd.modelparallel.sharding._torch_internals import local_part
from opensmd.modelparallel.sharding.former_layout import as_before_cutting

__all__ = ["OfShardedParameter", "OfWholeParameter", "TrainedSlice", "is_cut"]


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether the parameter itself is split over ranks."""
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


@dataclass
class TrainedSlice(ABC):
    """A slice, in the parameter's own memory.

    Attributes:
        parameter: the model's.
        own: the slice in the optimizer.
        number: the parameter's number in the whole optimizer.
    """

    parameter: nn.Parameter
    own: nn.Parameter
    number: int

    def follow(self) -> None:
        """Adopt the parameter's memory and gradient."""
        self.own.data = self.memory()
        self.own.grad = self.gradient()

    def forget_gradient(self) -> None:
        """Release the gradient; the parameter keeps it."""
        self.own.grad = None

    @abstractmethod
    def memory(self) -> Tensor:
        """Return the slice of the parameter's memory."""

    @abstractmethod
    def gradient(self) -> Tensor | None:
        """Return the slice of the parameter's gradient."""

    @abstractmethod
    def cut(self, whole: Tensor) -> Tensor:
        """Return the slice of a tensor of the parameter's shape."""

    @abstractmethod
    def whole(self, part: Tensor) -> Tensor:
        """Gather a tensor of the parameter's shape from the slices of all ranks, which must all call."""


@dataclass
class OfWholeParameter(TrainedSlice):
    """A range of the flattened elements of a parameter that all ranks have."""

    slicing: Slicing
    group: dist.ProcessGroup

    def memory(self) -> Tensor:
        return self.slicing.cut(self.parameter.data)

    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                "shard_optimizer_state: a parameter has sparse gradients, of which slices cannot be cut; use "
                "sparse=False"
            )
        return None if grad is None else self.slicing.cut(grad)

    def cut(self, whole: Tensor) -> Tensor:
        return self.slicing.cut(whole)

    def whole(self, part: Tensor) -> Tensor:
        whole = gathered(part, self.parameter.shape, self.slicing, self.group)
        return as_before_cutting(whole, self.parameter)


@dataclass
class OfShardedParameter(TrainedSlice):
    """This rank's part of a sharded parameter."""

    rows: Rows
    group: dist.ProcessGroup

    def memory(self) -> Tensor:
        return local_part(self._tensor).detach()

    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        return local_part(grad).detach() if isinstance(grad, DTensor) else None

    def cut(self, whole: Tensor) -> Tensor:
        return self.rows.cut(whole)

    def whole(self, part: Tensor) -> Tensor:
        whole = self.rows.whole(part, self.parameter.shape, self.group)
        return as_before_cutting(whole, self.parameter)

    @property
    def _tensor(self) -> DTensor:
        assert isinstance(self.parameter, DTensor)
        return self.parameter
