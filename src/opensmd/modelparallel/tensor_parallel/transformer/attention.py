"""``smp.nn.DistributedAttentionLayer``: multi-head attention whose heads are split over the ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.tensor_parallel.layers.linear import ColumnLinear, RowLinear, require_divisible
from opensmd.modelparallel.tensor_parallel.random import CommonDropout
from opensmd.modelparallel.tensor_parallel.transformer.blocks import Block, add, norm
from opensmd.modelparallel.tensor_parallel.transformer.flash_attention import AttentionCore
from opensmd.modelparallel.tensor_parallel.transformer.options import LayerOptions, layer_options

__all__ = ["DistributedAttentionLayer", "rotated"]


class DistributedAttentionLayer(Block):
    """Attention with projections, dropout, residual and normalisation.

    Args:
        num_attention_heads, attention_head_size: the number of ranks must divide the first.
        hidden_size: of inputs and outputs.
        attention_dropout_prob: of the probabilities; differs between tensor-parallel ranks.
        hidden_dropout_prob: of the output.
        layernorm_epsilon: of the normalisations.
        initializer_range, use_normal_initialization: whether and how weights are drawn from a normal
            distribution; otherwise as in torch.
        cross_attention: attend to other states.
        causal_mask_size: if None, every word sees all; otherwise none sees later ones.
        pre_layernorm, post_layernorm: normalise the input; normalise the sum with the residual.
        more: settings of :class:`LayerOptions`.

    Raises:
        TypeError: an unknown keyword.
        ValueError: the number of ranks does not divide the heads.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        name = "DistributedAttentionLayer"
        self.options = options = layer_options(
            name,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            causal_mask_size=None if cross_attention else causal_mask_size,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            **more,
        )
        require_divisible(f"smp.nn.{name}", num_attention_heads=num_attention_heads)
        self.cross_attention = cross_attention
        inner, std, bias = num_attention_heads * attention_head_size, options.std, options.use_qkv_bias
        alone = options.parallel_residual  # the layer normalises and adds
        self.pre_layernorm = norm(options, wanted=pre_layernorm and not alone)
        if cross_attention:
            self.query = ColumnLinear(hidden_size, inner, bias, std=std)
            self.key_value = ColumnLinear(hidden_size, inner, bias, layers=2, std=std)
        else:
            self.query_key_value = ColumnLinear(hidden_size, inner, bias, layers=3, std=std)
        self.core = AttentionCore(
            dropout=attention_dropout_prob,
            scale=_scale(options),
            causal=options.causal,
            window=options.window_size,
            in_fp32=options.attention_in_fp32,
            alibi=options.alibi_bias_max if options.use_alibi and not cross_attention else None,
        )
        self.dense = RowLinear(inner, hidden_size, options.use_attention_dense_bias, std=std)
        self.dropout = CommonDropout(hidden_dropout_prob)
        self.post_layernorm = norm(options, wanted=post_layernorm and not alone)

    def forward(self, inputs: Any) -> Tensor:
        """Attend.

        Args:
            inputs: ``(hidden, mask)``, or ``(hidden, cross states, cross mask)`` with cross attention. Hidden
                states are ``[batch, words, hidden_size]``; a mask of two axes ``[batch, words]`` has 1 for
                what is masked, one of four axes is boolean (True is seen) or added to the scores.

        Returns:
            ``[batch, words, hidden_size]``.
        """
        hidden, *rest = self.enter(_tuple(inputs))
        states = rest.pop(0) if self.cross_attention else None
        mask = rest[0] if rest else None
        output = self.attend(hidden, states, mask)
        return self.leave(output)

    def attend(self, hidden: Tensor, states: Tensor | None, mask: Tensor | None) -> Tensor:
        """:meth:`forward` within the shared region."""
        options = self.options
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        query, key, value = (self._heads(projection) for projection in self._projections(normed, states))
        if options.rotary_dim is not None:
            query, key = rotated(query, options.rotary_dim), rotated(key, options.rotary_dim)
        attended = self.core(query, key, value, _seen(mask))
        output: Tensor = self.dropout(self.dense(attended.transpose(1, 2).flatten(2)))
        if options.parallel_residual:
            return output
        output = add(hidden, output, options)
        if self.post_layernorm is not None:
            output = self.post_layernorm(output)
        return output

    def _projections(self, hidden: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if states is None:
            query, key, value = self.query_key_value(hidden).unbind(-2)
        else:
            query = self.query(hidden)
            key, value = self.key_value(states).unbind(-2)
        return query, key, value

    def _heads(self, tensor: Tensor) -> Tensor:
        shape = (*tensor.shape[:-1], -1, self.options.attention_head_size)
        return tensor.reshape(shape).transpose(1, 2)


def rotated(tensor: Tensor, dimensions: int) -> Tensor:
    """Apply rotary positions, from 0, to the first ``dimensions`` of each head, in adjacent pairs."""
    words = torch.arange(tensor.shape[-2], device=tensor.device, dtype=torch.float32)
    exponent = torch.arange(0, dimensions, 2, device=tensor.device, dtype=torch.float32) / dimensions
    angles = torch.outer(words, 1.0 / 10000**exponent)
    sine, cosine = (one.repeat_interleave(2, 1).to(tensor.dtype) for one in (angles.sin(), angles.cos()))
    turned, rest = tensor[..., :dimensions], tensor[..., dimensions:]
    across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    return torch.cat((turned * cosine + across * sine, rest), -1)


def _scale(options: LayerOptions) -> float:
    scale = 1 / math.sqrt(options.attention_head_size) if options.scale_attention_scores else 1.0
    return scale / (options.layer_idx + 1) if options.scale_attn_by_layer_idx else scale


def _seen(mask: Tensor | None) -> Tensor | None:
    """Convert a mask to the form for torch's attention."""
    return (mask == 0)[:, None, None, :] if mask is not None and mask.dim() == 2 else mask


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
