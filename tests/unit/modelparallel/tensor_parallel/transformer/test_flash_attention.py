"""FlashAttentionLayer against attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from opensmd.modelparallel.tensor_parallel.transformer.flash_attention import FlashAttentionLayer
from opensmd.said_once import warn_once


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_is_softmax_of_scaled_scores_times_values(causal: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 4, 8)
    layer = FlashAttentionLayer(0.0, 8, scale_attn_by_layer_idx=True, layer_idx=1)
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    scores = query @ key.transpose(-1, -2) / (math.sqrt(8) * 2)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(layer(qkv, causal=causal), scores.softmax(-1) @ value)
    torch.testing.assert_close(FlashAttentionLayer(0.0, scale=1 / (math.sqrt(8) * 2)).scale, layer.scale)


def test_linear_biases_are_added_to_the_scores() -> None:
    torch.manual_seed(0)
    qkv, mask = torch.randn(2, 3, 3, 2, 4), torch.tensor([0.0, -1.0, -2.0]).view(1, 1, 1, 3)
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    layer = FlashAttentionLayer(0.0, 4, use_alibi=True)
    scores = query @ key.transpose(-1, -2) / 2 + mask
    torch.testing.assert_close(layer(qkv, mask), scores.softmax(-1) @ value)
    later = torch.ones(3, 3).triu(1).bool()
    wanted = scores.masked_fill(later, -math.inf).softmax(-1) @ value
    torch.testing.assert_close(layer(qkv, mask, causal=True), wanted)
    with pytest.raises(ValueError, match="attn_mask needs use_alibi"):
        FlashAttentionLayer(0.0, 4)(qkv, mask)


def test_scales_need_what_they_are_made_of() -> None:
    with pytest.raises(ValueError, match="needs attention_head_size"):
        FlashAttentionLayer()
    with pytest.raises(ValueError, match="needs layer_idx"):
        FlashAttentionLayer(attention_head_size=2, scale_attn_by_layer_idx=True)
    warn_once.cache_clear()  # another test may have been told
    with pytest.warns(UserWarning, match="triton_flash_attention has no effect"):
        FlashAttentionLayer(scale=1.0, triton_flash_attention=True)
