"""The same transformer layers for both: the library's, and plain ones for torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

__all__ = ["HEAD", "LAYERS", "PlainLayer", "plain_stack"]

LAYERS = 2
HEAD = 16  # features of one attention head, so that four ranks share the narrowest layer


class PlainLayer(nn.Module):
    """A transformer layer that normalises its inputs, as most scripts write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[batch, words, width]`` to the same; heads may be those of one rank."""
        normed = self.first_norm(hidden)
        query, key, value = (
            own(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for own in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dense(attended.transpose(1, 2).flatten(2))
        normed = self.second_norm(hidden)
        output: Tensor = hidden + self.down(F.gelu(self.up(normed)))
        return output


def plain_stack(values: Mapping[str, Tensor], width: int, group: dist.ProcessGroup) -> nn.Module:
    """Plain layers with the values of the library's, split by torch over ``group``."""
    stack = nn.Sequential(*(PlainLayer(width) for _ in range(LAYERS)))
    stack.load_state_dict({name: each for layer in range(LAYERS) for name, each in _of(values, layer)})
    mesh = DeviceMesh.from_group(group, "cpu")
    columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for layer in stack:
        parallelize_module(layer, mesh, {**columns, "dense": RowwiseParallel(), "down": RowwiseParallel()})
    return stack


def _of(values: Mapping[str, Tensor], layer: int) -> list[tuple[str, Tensor]]:
    names = {
        "attention.pre_layernorm": "first_norm",
        "attention.dense": "dense",
        "output.pre_layernorm": "second_norm",
        "output.dense1": "up",
        "output.dense2": "down",
    }
    found = []
    for kind in ("weight", "bias"):
        for ours, theirs in names.items():
            found.append((f"{layer}.{theirs}.{kind}", values[f"seq_layers.{layer}.{ours}.{kind}"]))
        parts = values[f"seq_layers.{layer}.attention.query_key_value.{kind}"].unbind(0)
        found += [
            (f"{layer}.{name}.{kind}", part)
            for name, part in zip(("query", "key", "value"), parts, strict=True)
        ]
    return [(name, torch.clone(each)) for name, each in found]
