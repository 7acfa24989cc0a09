"""Habits of torch's own modules that matter for their distributed parts.

In evaluation, ``nn.TransformerEncoderLayer`` passes the weights of its linear layers to a fused kernel,
bypassing their modules; a distributed one's weight would be a slice.
"""

from __future__ import annotations

from torch import nn

__all__ = ["call_parts"]


def call_parts(module: nn.Module) -> None:
    """Make one of torch's modules call its children where it would use their weights directly."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
