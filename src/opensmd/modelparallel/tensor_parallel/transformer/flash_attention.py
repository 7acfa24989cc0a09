"""``smp.nn.FlashAttentionLayer`` and the attention of distributed layers, with torch's fused attention."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.tensor_parallel import random
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_rank, tensor_size
from opensmd.said_once import warn_once
from opensmd.upcast import upcast

__all__ = ["AttentionCore", "FlashAttentionLayer", "alibi_bias"]


class FlashAttentionLayer(nn.Module):
    """Attention of packed queries, keys and values by ``scaled_dot_product_attention``.

    Args:
        attention_dropout_prob: dropout of the attention's probabilities.
        attention_head_size: needed with ``scale_attention_scores``, which divides scores by its root.
        scale_attention_scores: see ``attention_head_size``.
        scale_attn_by_layer_idx: also divide scores by ``layer_idx + 1``.
        layer_idx: the layer's number, from 0.
        scale: multiply scores by this instead.
        triton_flash_attention: accepted and ignored; torch chooses its own kernel.
        use_alibi: add ``attn_mask`` (linear biases) to the scores.

    Raises:
        ValueError: an argument that another one needs is missing.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.attention_dropout_prob, self.use_alibi = attention_dropout_prob, use_alibi
        if triton_flash_attention:
            warn_once(
                "smp.nn.FlashAttentionLayer: triton_flash_attention has no effect: torch chooses a kernel"
            )
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise ValueError(
                        "smp.nn.FlashAttentionLayer: scale_attention_scores=True needs attention_head_size"
                    )
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise ValueError(
                        "smp.nn.FlashAttentionLayer: scale_attn_by_layer_idx=True needs layer_idx"
                    )
                scale /= layer_idx + 1
        self.scale = scale

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend.

        Args:
            qkv: ``[batch, words, 3, heads, head size]``.
            attn_mask: added to the scores, such as ``[batch, 1, 1, words]``; only with ``use_alibi``.
            causal: no word sees later ones.

        Returns:
            ``[batch, heads, words, head size]``.

        Raises:
            ValueError: a mask without ``use_alibi``.
        """
        if attn_mask is not None and not self.use_alibi:
            raise ValueError("smp.nn.FlashAttentionLayer: attn_mask needs use_alibi=True")
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if attn_mask is not None and causal:
            words = qkv.shape[1]
            later = torch.ones(words, words, dtype=torch.bool, device=qkv.device).triu(1)
            attn_mask = attn_mask.to(qkv.dtype).masked_fill(later, -math.inf)
            causal = False
        dropout = self.attention_dropout_prob if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout, is_causal=causal, scale=self.scale
        )


class AttentionCore(nn.Module):
    """The part between the projections of a distributed attention layer, for this rank's heads.

    Args:
        dropout: that of the probabilities, which differs between tensor-parallel ranks.
        scale: the factor for scores.
        causal: no word sees later ones.
        window: with ``causal``, how many words a word sees, including itself; None for all.
        in_fp32: compute in float32.
        alibi: add linear biases with this largest exponent; None for none.
    """

    def __init__(
        self,
        *,
        dropout: float,
        scale: float,
        causal: bool,
        window: int | None,
        in_fp32: bool,
        alibi: float | None,
    ) -> None:
        super().__init__()
        self.dropout, self.scale, self.causal = dropout, scale, causal
        self.window, self.in_fp32, self.alibi = window, in_fp32, alibi

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to ``[batch, heads, words, size]``; a mask is boolean (True is seen) or added."""
        dtype = query.dtype
        if self.in_fp32:
            query, key, value = upcast(query), upcast(key), upcast(value)
        bias, causal = self._bias(query, key, mask)
        dropout = self.dropout if self.training else 0.0
        with random.per_tensor_rank() if dropout else contextlib.nullcontext():
            output = F.scaled_dot_product_attention(
                query, key, value, bias, dropout_p=dropout, is_causal=causal, scale=self.scale
            )
        return output.to(dtype)

    def _bias(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return what is added to or masks the scores, and whether the kernel itself masks later words."""
        if mask is None and self.alibi is None and self.window is None:
            return None, self.causal
        words, seen_words = query.shape[-2], key.shape[-2]
        if self.causal:
            visible = torch.ones(words, seen_words, dtype=torch.bool, device=query.device).tril(
                seen_words - words
            )
            if self.window is not None:
                visible = visible.triu(seen_words - words - self.window + 1)
            if mask is None:
                mask = visible
            elif mask.dtype == torch.bool:
                mask = mask & visible
            else:
                mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
        if self.alibi is not None:
            bias = alibi_bias(query.shape[1], seen_words, self.alibi, query.dtype, query.device)
            if mask is None:
                mask = bias
            elif mask.dtype == torch.bool:
                mask = bias.expand(*mask.shape[:-3], bias.shape[0], *mask.shape[-2:]).masked_fill(
                    ~mask, torch.finfo(bias.dtype).min
                )
            else:
                mask = mask + bias
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        return mask, False


def alibi_bias(heads: int, words: int, largest: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return linear biases of this rank's ``heads``: ``[heads, 1, words]``, rising towards the last word.

    Adding a constant to a row does not change its softmax, so they need not depend on the query.
    """
    every = heads * tensor_size()
    first = heads * tensor_rank()
    number = torch.arange(first + 1, first + heads + 1, device=device, dtype=torch.float32)
    slopes = torch.exp2(-largest * number / every)
    position = torch.arange(words, device=device, dtype=torch.float32)
    return (slopes.view(-1, 1, 1) * (position - words + 1)).to(dtype)
