"""Linear layers split by columns (outputs) or rows (inputs), and ``smp.nn.DistributedLinear``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.ranks.shards import ShardedModule
from opensmd.modelparallel.tensor_parallel.collectives import own_slice, summed_in_place, to_split
from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule, split_parameter
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_size

__all__ = ["ColumnLinear", "DistributedLinear", "RowLinear", "require_divisible"]


class ColumnLinear(ShardedModule):
    """A linear layer in which each rank computes some outputs; common input, split output.

    Args:
        in_features, out_features: of the whole layer.
        bias: add one.
        layers: the number of layers with the same input in one multiplication, such as query, key and value;
            the weight is then ``[layers, out_features, in_features]`` and the output ``[..., layers, out]``.
        std: initialise weights from a normal distribution; None for torch's initialisation.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        layers: int | None = None,
        std: float | None,
    ) -> None:
        super().__init__()
        self.layers = layers
        wholes = [_fresh(in_features, out_features, bias, std) for _ in range(layers or 1)]
        weight = torch.stack([whole.weight for whole in wholes]) if layers else wholes[0].weight
        split_parameter(self, "weight", weight, weight.dim() - 2)
        if bias:
            both = torch.stack([whole.bias for whole in wholes]) if layers else wholes[0].bias
            split_parameter(self, "bias", both, both.dim() - 1)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to this rank's outputs; several layers are the last axis but one."""
        weight, bias = self.weight, self.bias
        if self.layers is None:
            return F.linear(to_split(input), weight, bias)
        flat = None if bias is None else bias.flatten()
        output = F.linear(to_split(input), weight.flatten(0, 1), flat)
        return output.view(*output.shape[:-1], self.layers, -1)


class RowLinear(ShardedModule):
    """A linear layer in which each rank multiplies some inputs; split input, common output.

    Args:
        in_features, out_features: of the whole layer.
        bias: add one, after the sum.
        std: initialise the weight from a normal distribution; None for torch's initialisation.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, std: float | None) -> None:
        super().__init__()
        whole = _fresh(in_features, out_features, bias, std)
        split_parameter(self, "weight", whole.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach()) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., this rank's inputs]`` to ``[..., out_features]``."""
        output = summed_in_place(F.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


class DistributedLinear(DistributedModule):
    """``torch.nn.Linear`` whose input channels are split over the tensor-parallel ranks.

    Args:
        in_features: size of the whole input; the number of ranks must divide it.
        out_features: size of the output.
        bias: add one.

    Raises:
        ValueError: the number of ranks does not divide ``in_features``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        require_divisible("smp.nn.DistributedLinear", in_features=in_features)
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias)
        self.split_parameter("weight", whole.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach()) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        alone = input.dim() == 1  # without a batch
        own = own_slice(self.gather_batch(input.unsqueeze(0) if alone else input), -1)
        output = summed_in_place(F.linear(own, self.weight))
        output = self.scatter_batch(output if self.bias is None else output + self.bias)
        return output.squeeze(0) if alone else output

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={tensor_size()}"


def require_divisible(name: str, **sizes: int) -> None:
    """Refuse sizes that the number of tensor-parallel ranks does not divide.

    Raises:
        ValueError: there are such sizes; the message names them.
    """
    ranks = tensor_size()
    wrong = [f"{size}={value}" for size, value in sizes.items() if value % ranks]
    if wrong:
        raise ValueError(f"{name}: {', '.join(wrong)} cannot be divided by {ranks} tensor-parallel ranks")


def _fresh(in_features: int, out_features: int, bias: bool, std: float | None) -> nn.Linear:
    """Return a whole layer with its initial values, which are the same for every number of ranks."""
    whole = nn.Linear(in_features, out_features, bias)
    if std is not None:
        nn.init.normal_(whole.weight, std=std)
        if bias:
            nn.init.zeros_(whole.bias)
    return whole
