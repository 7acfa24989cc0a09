"""GPT-Neo: its distributed counterpart and its state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.causal_lm import language_model, settings_of
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, translations_of

__all__ = [
    "TRANSLATIONS",
    "distributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

FAMILY = Family(
    layers="h",
    modules={
        "ln_1": "attention.pre_layernorm",
        "attn.attention.out_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    separate=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    outside={"wte": "word_embedding", "wpe": "position_embedding", "ln_f": "layernorm"},
    body="transformer.",
    buffers=("attn.attention.bias", "attn.attention.masked_bias"),
)


def distributed(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return the distributed counterpart of a ``GPTNeoForCausalLM`` or ``GPTNeoModel``.

    Raises:
        ValueError: sizes that the number of ranks does not divide.
    """
    return language_model(module, config, FAMILY, _settings)


TRANSLATIONS = translations_of(FAMILY)
translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = TRANSLATIONS


def _settings(config: Any) -> dict[str, Any]:
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return settings_of(
        num_layers=config.num_layers,
        window_sizes=windows,
        num_attention_heads=config.num_heads,
        attention_head_size=config.hidden_size // config.num_heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        vocab_size=config.vocab_size,
        num_positions=config.max_position_embeddings,
        attention_dropout_prob=float(config.attention_dropout),
        hidden_dropout_prob=float(config.resid_dropout),
        embedding_dropout_prob=float(config.embed_dropout),
        activation=config.activation_function,
        layernorm_epsilon=config.layer_norm_epsilon,
        causal_mask_size=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        use_qkv_bias=False,
        scale_attention_scores=False,
        attention_in_fp32=True,
    )
