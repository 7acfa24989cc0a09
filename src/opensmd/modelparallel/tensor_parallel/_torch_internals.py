"""The habits of torch's own modules that their distributed parts need to be known, in one place.

In evaluation ``nn.TransformerEncoderLayer`` gives the weights of its linear layers to a fused kernel, past
the modules that have them: of a distributed one that would be a slice.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["call_parts", "is_compiled"]


def call_parts(module: nn.Module) -> None:
    """Let a module of torch's call the modules in it, where it would take their weights."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` compiles it; asked without loading the compiler."""
    wrapper: Any = sys.modules.get("torch._dynamo.eval_frame")
    return module._compiled_call_impl is not None or (
        wrapper is not None and isinstance(module, wrapper.OptimizedModule)
    )
