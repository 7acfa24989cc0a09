"""The common settings of a distributed transformer's layers: every documented one, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opensmd.said_once import warn_once

__all__ = ["EXTRA_OPTIONS", "LayerOptions", "activation_of", "layer_options"]

# What torch's fused kernels do anyway, or what changes the rounding of kernels that do not exist here.
_WITHOUT_EFFECT = {
    "fused_bias_gelu": "torch adds the bias in the multiplication and has one kernel for the activation",
    "fused_dropout": "torch's dropout is one kernel already",
    "query_key_layer_scaling": "torch's attention keeps its scores in float32",
}


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Settings of a transformer layer; those of ``smp.nn.DistributedTransformerLayer`` come first.

    Attributes:
        attention_in_fp32: compute attention in float32.
        fp32_residual_addition: add the residual in float32.
        fused_softmax, flash_attention: accepted and ignored; torch chooses among its fused kernels.
        fused_bias_gelu, fused_dropout, query_key_layer_scaling: accepted with a warning.
        use_alibi, alibi_bias_max: linear biases in place of positions.
        distribute_embedding: split the vocabulary over the ranks.
        zero_init: accepted by contexts; modules have torch's initial values.
        scale_attention_scores: divide scores by the root of the head's size.
        scale_attn_by_layer_idx: also divide them by the layer's number, from 1.
        layer_idx: the layer's number from 0.
        use_qkv_bias, use_attention_dense_bias: biases of the attention's layers.
        rotary_dim: how many dimensions of each head positions rotate, in adjacent pairs; None for none.
        window_size: how many words a causal layer sees; None for all.
        parallel_residual: attention and output use the same normalised input, and both are added to the
            residual.
    """

    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    attention_in_fp32: bool = False
    fp32_residual_addition: bool = False
    fused_softmax: bool = True
    fused_bias_gelu: bool = False
    fused_dropout: bool = False
    flash_attention: bool = True
    query_key_layer_scaling: bool = False
    use_alibi: bool = False
    alibi_bias_max: float = 8.0
    distribute_embedding: bool = True
    zero_init: bool = False
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int = 0
    use_qkv_bias: bool = True
    use_attention_dense_bias: bool = True
    rotary_dim: int | None = None
    window_size: int | None = None
    parallel_residual: bool = False

    @property
    def std(self) -> float | None:
        """The standard deviation of initial weights; None for torch's initialisation."""
        return self.initializer_range if self.use_normal_initialization else None

    @property
    def causal(self) -> bool:
        """Whether no word sees later ones."""
        return self.causal_mask_size is not None


_DOCUMENTED = [field.name for field in fields(LayerOptions)][:14]
EXTRA_OPTIONS = frozenset(field.name for field in fields(LayerOptions)) - frozenset(_DOCUMENTED)


def layer_options(owner: str, /, **given: Any) -> LayerOptions:
    """Check and complete the arguments of a class ``owner``.

    Raises:
        TypeError: an unknown keyword.
        ValueError: inconsistent attention heads, or no normalisation at all.

    Warns:
        UserWarning: once for each requested setting without effect.
    """
    unknown = sorted(given.keys() - {field.name for field in fields(LayerOptions)})
    if unknown:
        raise TypeError(
            f"smp.nn.{owner} takes no {', '.join(unknown)}; besides its own arguments it takes "
            f"{', '.join(sorted(EXTRA_OPTIONS))}"
        )
    options = LayerOptions(**given)
    for name, reason in _WITHOUT_EFFECT.items():
        if getattr(options, name):
            warn_once(f"smp.nn: {name}=True has no effect: {reason}")
    if not (options.pre_layernorm or options.post_layernorm or options.parallel_residual):
        raise ValueError(f"smp.nn.{owner}: at least one of pre_layernorm and post_layernorm must be True")
    return options


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function for an activation's name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; expected one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _tanh_gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
