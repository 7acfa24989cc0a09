"""A tiny configuration of any transformers architecture, by what its settings are called.

Configurations name the same things alike: a setting that ends in "layers" is a depth, one with "drop" in it
is a probability. So one table of names makes most architectures tiny; what it makes impossible does not train
in plain PyTorch either and is left out by the zoo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["LAYERS", "VOCABULARY", "tiny"]

VOCABULARY = 64
LAYERS = 4
WIDTH = 32
HEADS = 4
LONGEST = 64  # positions

# The first pattern that a setting's name matches says its value; only whole numbers are replaced.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers", 99),  # as many as there are entries in lists
    (r"vocab_size|.*_vocab_size|text_vocab.*", VOCABULARY),
    (r".*token_id|.*_token_index|.*_index", 3),
    (r"qk_head_dim", 2 * WIDTH // HEADS),
    (r"rotary_dim", WIDTH // HEADS),
    (r"num_key_value_heads|.*kv_heads|multi_query_group_num|num_kv.*", 2),
    (r"(num|n)_group|topk_group|n_shared_experts|first_k_dense_replace", 1),
    (r".*(num|n)_.*experts_per_tok|.*top_?k.*|moe_k", 2),
    (r".*(num|n)_.*experts|.*experts_num|num_experts", 4),
    (r".*(num|n)_?(hidden_|encoder_|decoder_|conv_)?layers?|.*layers|depth|.*num_blocks|n_layer", LAYERS),
    (r".*(num|n)_.*heads?|.*attention_heads|n_head|heads", HEADS),
    (r"num_labels|num_classes", 4),
    (r".*head_dim|d_kv|.*head_size|attention_key_size|kv_channels", WIDTH // HEADS),
    (r".*lora_rank|.*lora_dim", WIDTH // 2),
    (r"qk_.*dim|v_head_dim", WIDTH // HEADS),
    (r".*(intermediate|ffn|inner|feed_forward|d_ff|mlp_hidden).*", 2 * WIDTH),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|emb_dim|projection_dim).*", WIDTH),
    (r"dim|width|n_embed|embedding_dim|.*conv_dim|lru_width", WIDTH),
    (
        r".*max_position.*|n_positions|n_ctx|max_.*positions|.*_length|max_seq.*|seq_length|.*context_length",
        LONGEST,
    ),
    (r"window_size", 4),
    (r"sliding_window|.*window_size|attention_window|.*chunk_size|block_size", 8),
    (r"image_size|input_size", 32),
    (r"patch_size", 8),
    (r"state_size|ssm_state_size|mamba_d_state|d_state", 8),
)
_COMPILED = tuple((re.compile(pattern), value) for pattern, value in _NUMBERS)
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_layers")


def tiny(config: Any) -> Any:
    """``config``, which is new and has its defaults, with small numbers and nothing random."""
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            new = _small(name, value)
            if new is not value:
                setattr(part, name, new)
        part._attn_implementation = "eager"
        if hasattr(part, "qk_rope_head_dim"):  # latent attention has keys for each head
            part.num_key_value_heads = HEADS
        if getattr(part, "num_experts_per_tok", 0) is None:
            part.num_experts_per_tok = 2
        _end_at_last_stage(part)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


def _end_at_last_stage(part: Any) -> None:
    """A backbone with a stage a layer has fewer of them now, and gives what the last one has made."""
    stages = getattr(part, "stage_names", None)
    if stages and len(stages) == 13 and stages[-1] == "stage12":
        part.stage_names = stages[: LAYERS + 1]
        part._out_features, part._out_indices = [f"stage{LAYERS}"], [LAYERS]


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those of its towers."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)


def _small(name: str, value: Any) -> Any:
    if name.startswith("_"):
        return value
    if isinstance(value, float) and ("drop" in name or re.fullmatch(r"mask_.*prob", name)):
        return 0.0
    if isinstance(value, list | tuple) and value:
        return _small_list(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, number in _COMPILED:
        if pattern.fullmatch(name):
            return min(value, number) if value > 0 else value
    return value


def _small_list(name: str, values: list[Any] | tuple[Any, ...]) -> Any:
    """Lists have an entry a layer or stage; layers are fewer then, stages as many as before."""
    if name == "attention_types":  # [[kinds, how many times], ...]
        kinds = values[0][0]
        return [[kinds, LAYERS // len(kinds)]]
    if name in _LAYER_LISTS:
        return [*dict.fromkeys(values), *values][:LAYERS] if len(values) >= LAYERS else values
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return values
    if name in ("depths", "num_blocks", "layers"):
        return type(values)([1] * len(values))
    if "heads" in name:
        return type(values)([2] * len(values))
    if "hidden_sizes" in name or "dims" in name or "channels" in name or name == "conv_dim":
        return type(values)([8 * (1 + place) for place in range(len(values))])
    return values
