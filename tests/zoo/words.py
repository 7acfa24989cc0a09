"""Models for words and sequences: peft, sentence-transformers, open_clip, x-transformers, mambapy, xlstm."""

# mypy: ignore-errors
# these libraries are not there when the project is checked
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.model import ROWS, Model

__all__ = ["MODELS"]

WORDS = 12
VOCABULARY = 64
WIDTH = 32


def _ids(step: int) -> Tensor:
    return torch.randint(4, VOCABULARY, (ROWS, WORDS), generator=torch.Generator().manual_seed(step))


def _vectors(step: int) -> Tensor:
    return torch.randn(ROWS, WORDS, WIDTH, generator=torch.Generator().manual_seed(step))


def _pictures(step: int) -> Tensor:
    return torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(step))


def _llama() -> nn.Module:
    transformers = importlib.import_module("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _bert() -> nn.Module:
    transformers = importlib.import_module("transformers")
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _peft(kind: str, **options: Any) -> Model:
    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        made = peft.get_peft_model(_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for parameter in made.parameters():  # some begin with zeros, which hide much
                if parameter.requires_grad and not parameter.any():
                    parameter.normal_(0, 0.02)
        return made

    def batch(step: int) -> dict[str, Any]:
        words = _ids(step)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    return Model(build=build, batch=batch)


class _Words(nn.Module):
    """The first module of a sentence-transformer, without a tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = _bert()

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        out = self.auto_model(features["input_ids"], features["attention_mask"])
        return {**features, "token_embeddings": out.last_hidden_state}


class _Sentence(nn.Module):
    """A sentence-transformer that takes its features by name."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        package = importlib.import_module("sentence_transformers")
        self.model = package.SentenceTransformer(modules=[_Words(), *more], device="cpu")

    def forward(self, **features: Any) -> Tensor:
        return self.model(features)["sentence_embedding"]


def _sentence(*kinds: tuple[str, dict[str, Any]]) -> Model:
    def build() -> nn.Module:
        models = importlib.import_module("sentence_transformers.models")
        return _Sentence(*[getattr(models, kind)(**options) for kind, options in kinds])

    def batch(step: int) -> dict[str, Any]:
        words = _ids(step)
        lengths = torch.full((ROWS,), WORDS)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "sentence_lengths": lengths}

    return Model(build=build, batch=batch)


VISION = {"layers": 2, "width": WIDTH, "head_width": 8, "patch_size": 8, "image_size": 32}
TEXT = {"context_length": WORDS, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 4, "layers": 2}


def _open_clip(kind: str, **more: Any) -> Model:
    def build() -> nn.Module:
        return getattr(importlib.import_module("open_clip"), kind)(
            WIDTH, VISION, TEXT, output_dict=True, **more
        )

    return Model(build=build, batch=lambda step: {"image": _pictures(step), "text": _ids(step)})


def _x(wrapper: str = "TransformerWrapper", layers: str = "Decoder", **options: Any) -> Model:
    def build() -> nn.Module:
        package = importlib.import_module("x_transformers")
        stack = getattr(package, layers)(dim=WIDTH, depth=4, heads=4, **options)
        if wrapper == "ViTransformerWrapper":
            return package.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=4, attn_layers=stack)
        if wrapper == "ContinuousTransformerWrapper":
            return package.ContinuousTransformerWrapper(
                max_seq_len=64, attn_layers=stack, dim_in=WIDTH, dim_out=8
            )
        made = package.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=stack)
        return package.AutoregressiveWrapper(made) if wrapper == "AutoregressiveWrapper" else made

    if wrapper == "ViTransformerWrapper":
        return Model(build=build, batch=lambda step: {"img": _pictures(step)})
    if wrapper == "ContinuousTransformerWrapper":
        return Model(build=build, batch=lambda step: {"x": _vectors(step)})
    return Model(build=build, batch=lambda step: {"x": _ids(step)})


def _x_both() -> Model:
    def build() -> nn.Module:
        sides = {
            f"{side}_{name}": value
            for side in ("enc", "dec")
            for name, value in {"num_tokens": VOCABULARY, "depth": 2, "heads": 4, "max_seq_len": 64}.items()
        }
        return importlib.import_module("x_transformers").XTransformer(dim=WIDTH, **sides)

    return Model(build=build, batch=lambda step: {"src": _ids(step), "tgt": _ids(step + 9)})


def _mamba(kind: str) -> Model:
    def build() -> nn.Module:
        package = importlib.import_module(f"mambapy.{kind.lower()}")
        if kind == "Mamba":
            return package.Mamba(package.MambaConfig(d_model=WIDTH, n_layers=4))
        config = package.JambaLMConfig(
            d_model=WIDTH,
            n_layers=4,
            mlp_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=2,
            num_experts_per_tok=1,
            vocab_size=VOCABULARY,
        )
        return package.Jamba(config)

    return Model(build=build, batch=lambda step: {"x": _vectors(step)})


def _xlstm(kind: str) -> Model:
    def build() -> nn.Module:
        package = importlib.import_module("xlstm")
        mlstm = package.mLSTMBlockConfig(
            mlstm=package.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
        )
        slstm = package.sLSTMBlockConfig(
            slstm=package.sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4),
            feedforward=package.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
        )
        parts = {"mlstm_block": mlstm, "slstm_block": slstm}
        used = parts if kind == "both" else {f"{kind}_block": parts[f"{kind}_block"]}
        where = {"slstm_at": [1] if kind == "both" else "all" if kind == "slstm" else []}
        config = package.xLSTMBlockStackConfig(
            context_length=WORDS, num_blocks=4, embedding_dim=WIDTH, **used, **where
        )
        return package.xLSTMBlockStack(config)

    return Model(build=build, batch=lambda step: {"x": _vectors(step)})


POOLING = ("Pooling", {"word_embedding_dimension": WIDTH})
DENSE = ("Dense", {"in_features": WIDTH, "out_features": 16})

MODELS: dict[str, dict[str, Callable[[], Model]]] = {
    "peft": {
        "LoRA": lambda: _peft("LoraConfig", r=4),
        "DoRA": lambda: _peft("LoraConfig", r=4, use_dora=True),
        "LoRA of all layers": lambda: _peft("LoraConfig", r=4, target_modules="all-linear"),
        "LoRA with saved modules": lambda: _peft("LoraConfig", r=4, modules_to_save=["lm_head"]),
        "IA3": lambda: _peft("IA3Config"),
        "LoHa": lambda: _peft("LoHaConfig", r=4, target_modules=["q_proj", "v_proj"]),
        "LoKr": lambda: _peft("LoKrConfig", r=4, target_modules=["q_proj", "v_proj"]),
        "VeRA": lambda: _peft("VeraConfig", r=4, target_modules=["q_proj"]),
        "OFT": lambda: _peft("OFTConfig", oft_block_size=8, target_modules=["q_proj"]),
        "BOFT": lambda: _peft("BOFTConfig", boft_block_size=8, target_modules=["q_proj"]),
        "prompt tuning": lambda: _peft("PromptTuningConfig", num_virtual_tokens=4),
        "prefix tuning": lambda: _peft("PrefixTuningConfig", num_virtual_tokens=4),
        "P-tuning": lambda: _peft("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
        "LN tuning": lambda: _peft("LNTuningConfig"),
        "VB-LoRA": lambda: _peft(
            "VBLoRAConfig", r=4, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"]
        ),
    },
    "sentence-transformers": {
        "mean": lambda: _sentence(POOLING),
        "dense": lambda: _sentence(POOLING, DENSE, ("Normalize", {})),
        "max and cls": lambda: _sentence(
            ("Pooling", {"word_embedding_dimension": WIDTH, "pooling_mode": "max"}), DENSE
        ),
        "CNN": lambda: _sentence(
            ("CNN", {"in_word_embedding_dimension": WIDTH, "out_channels": 8}),
            ("Pooling", {"word_embedding_dimension": 24}),
        ),
        "LSTM": lambda: _sentence(
            ("LSTM", {"word_embedding_dimension": WIDTH, "hidden_dim": 8}),
            ("Pooling", {"word_embedding_dimension": 16}),
        ),
    },
    "open_clip": {
        "CLIP": lambda: _open_clip("CLIP"),
        "CustomTextCLIP": lambda: _open_clip("CustomTextCLIP"),
        "CLIP with a bias": lambda: _open_clip("CLIP", init_logit_bias=-10.0),
    },
    "x-transformers": {
        "decoder": _x,
        "encoder": lambda: _x(layers="Encoder"),
        "rotary": lambda: _x(rotary_pos_emb=True),
        "ALiBi": lambda: _x(alibi_pos_bias=True, alibi_num_heads=2),
        "gated feedforward": lambda: _x(ff_glu=True, use_rmsnorm=True),
        "normed keys": lambda: _x(attn_qk_norm=True),
        "T5 positions": lambda: _x(rel_pos_bias=True),
        "memory": lambda: _x(attn_num_mem_kv=4),
        "talking heads": lambda: _x(attn_pre_talking_heads=True),
        "shifted tokens": lambda: _x(shift_tokens=1),
        "macaron": lambda: _x(macaron=True),
        "sandwich norm": lambda: _x(sandwich_norm=True),
        "gated residuals": lambda: _x(gate_residual=True),
        "autoregressive": lambda: _x("AutoregressiveWrapper"),
        "pictures": lambda: _x("ViTransformerWrapper", "Encoder"),
        "vectors": lambda: _x("ContinuousTransformerWrapper", "Encoder"),
        "encoder and decoder": _x_both,
    },
    "mambapy": {name: functools.partial(_mamba, name) for name in ("Mamba", "Jamba")},
    "xlstm": {name: functools.partial(_xlstm, name) for name in ("mlstm", "slstm", "both")},
}
