"""GPT-2: its distributed counterpart and its state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.causal_lm import language_model, settings_of_gpt
from opensmd.modelparallel.tensor_parallel.huggingface.translation import (
    Family,
    from_huggingface,
    to_huggingface,
)

__all__ = [
    "TRANSLATIONS",
    "distributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

FAMILY = Family(
    layers="h",
    modules={
        "ln_1": "attention.pre_layernorm",
        "attn.c_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    fused="attn.c_attn",
    conv1d=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    outside={"wte": "word_embedding", "wpe": "position_embedding", "ln_f": "layernorm"},
    body="transformer.",
    buffers=("attn.bias", "attn.masked_bias"),
)


def distributed(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """The distributed counterpart of a ``GPT2LMHeadModel`` or ``GPT2Model``.

    Raises:
        ValueError: it has cross attention, or sizes that the ranks do not divide.
    """
    return language_model(module, config, FAMILY, _settings)


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """A distributed GPT-2's full state dict with Hugging Face's names and shapes.

    Args:
        max_seq_len: accepted; today's models make their causal masks themselves.
    """
    return to_huggingface(FAMILY, state_dict)


def translate_hf_state_dict_to_smdistributed_gpt2(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face GPT-2's state dict for a distributed one."""
    return from_huggingface(FAMILY, state_dict)


TRANSLATIONS = (translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2)


def _settings(config: Any) -> dict[str, Any]:
    if config.add_cross_attention:
        raise ValueError("a GPT-2 with cross attention has no distributed counterpart")
    return settings_of_gpt(
        config,
        num_positions=config.n_positions,
        scale_attention_scores=config.scale_attn_weights,
        scale_attn_by_layer_idx=config.scale_attn_by_inverse_layer_idx,
        attention_in_fp32=config.reorder_and_upcast_attn,
    )
