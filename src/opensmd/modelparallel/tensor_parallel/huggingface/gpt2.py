"""GPT-2: its distributed counterpart and its state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.causal_lm import language_model, settings_of_gpt
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, translations_of

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
    """Return the distributed counterpart of a ``GPT2LMHeadModel`` or ``GPT2Model``.

    Raises:
        ValueError: it has cross attention, or sizes that the number of ranks does not divide.
    """
    return language_model(module, config, FAMILY, _settings)


TRANSLATIONS = translations_of(FAMILY)
translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = TRANSLATIONS


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
