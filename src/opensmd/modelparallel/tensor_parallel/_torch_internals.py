"""The habits of torch's own modules that their distributed parts need to be known, in one place.

In evaluation ``nn.TransformerEncoderLayer`` gives the weights of its linear layers to a fused kernel, past
the modules that have them: of a distributed one that would be a slice.
"""

from __future__ import annotations

from torch import nn

__all__ = ["call_parts"]


def call_parts(module: nn.Module) -> None:
    """Let a module of torch's call the modules in it, where it would take their weights."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
