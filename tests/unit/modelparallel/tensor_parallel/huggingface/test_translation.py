"""State dicts there and back, between Hugging Face's layout and that of distributed transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from opensmd.modelparallel.tensor_parallel.huggingface.translation import (
    Family,
    from_huggingface,
    to_huggingface,
    translations_of,
)

WIDTH = 4
FUSED = Family(
    layers="h",
    modules={"attn.c_proj": "attention.dense", "ln_1": "attention.layernorm"},
    fused="attn.c_attn",
    conv1d=frozenset({"attn.c_attn", "attn.c_proj"}),
    outside={"wte": "word_embedding", "ln_f": "layernorm"},
    body="transformer.",
    buffers=("attn.bias",),
)
SEPARATE = Family(
    layers="layer", modules={"output": "output.dense"}, separate=("self.query", "self.key", "self.value")
)


def fused_model() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {
        "transformer.wte.weight": (7, WIDTH),
        "transformer.h.0.attn.c_attn.weight": (WIDTH, 3 * WIDTH),
        "transformer.h.0.attn.c_attn.bias": (3 * WIDTH,),
        "transformer.h.0.attn.c_proj.weight": (WIDTH, WIDTH),
        "transformer.h.0.ln_1.weight": (WIDTH,),
        "transformer.ln_f.bias": (WIDTH,),
        "lm_head.weight": (7, WIDTH),
    }
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_comes_back_as_it_was_whatever_its_layers_are_called() -> None:
    there = fused_model()
    assert same(to_huggingface(FUSED, from_huggingface(FUSED, there)), there)
    encoder = {
        f"bert.layer.3.self.{part}.weight": torch.full((2, WIDTH), float(i))
        for i, part in enumerate(("query", "key", "value"))
    }
    assert same(to_huggingface(SEPARATE, from_huggingface(SEPARATE, encoder)), encoder)


def test_query_key_and_value_are_the_rows_of_one_parameter_and_conv1d_is_transposed() -> None:
    there = fused_model()
    here = from_huggingface(FUSED, there)
    whole = here["transformer.seq_layers.0.attention.query_key_value.weight"]
    fused = there["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(whole[1], fused[:, WIDTH : 2 * WIDTH].t())
    dense = here["transformer.seq_layers.0.attention.dense.weight"]
    assert torch.equal(dense, there["transformer.h.0.attn.c_proj.weight"].t())


def test_a_model_without_a_head_has_no_name_around_its_body() -> None:
    here = {"word_embedding.weight": torch.ones(7, WIDTH)}
    assert list(to_huggingface(FUSED, here)) == ["wte.weight"]
    assert list(to_huggingface(FUSED, here, has_head=True)) == ["transformer.wte.weight"]


def test_buffers_of_old_checkpoints_are_left_out_and_unknown_names_stay() -> None:
    given = {"transformer.h.0.attn.bias": torch.ones(1), "extra.weight": torch.ones(2)}
    assert list(from_huggingface(FUSED, given)) == ["extra.weight"]


def test_the_two_functions_for_scripts_are_each_others_inverse() -> None:
    to_hf, from_hf = translations_of(FUSED)
    there = fused_model()
    assert same(to_hf(from_hf(there), max_seq_len=8), there)
