"""GPT-J: its distributed counterpart and its state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.causal_lm import language_model, settings_of_gpt
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, translations_of

__all__ = [
    "TRANSLATIONS",
    "distributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

FAMILY = Family(
    layers="h",
    modules={
        "ln_1": "layernorm",
        "attn.out_proj": "attention.dense",
        "mlp.fc_in": "output.dense1",
        "mlp.fc_out": "output.dense2",
    },
    separate=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    outside={"wte": "word_embedding", "ln_f": "layernorm"},
    body="transformer.",
    buffers=("attn.bias", "attn.masked_bias"),
)


def distributed(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return the distributed counterpart of a ``GPTJForCausalLM`` or ``GPTJModel``.

    Raises:
        ValueError: sizes that the number of ranks does not divide.
    """
    return language_model(module, config, FAMILY, _settings)


TRANSLATIONS = translations_of(FAMILY)
translate_state_dict_to_hf_gptj, translate_hf_state_dict_to_smdistributed_gptj = TRANSLATIONS


def _settings(config: Any) -> dict[str, Any]:
    return settings_of_gpt(
        config,
        num_positions=0,
        use_qkv_bias=False,
        use_attention_dense_bias=False,
        rotary_dim=config.rotary_dim or config.n_embd // config.n_head,
        parallel_residual=True,
        attention_in_fp32=True,
    )
