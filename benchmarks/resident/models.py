"""The models, for the jobs and for ``smd plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["FACTORIES", "MICROBATCHES", "RANKS", "VOCABULARY", "WORDS", "gpt2"]

RANKS = {"GPT-2, 124 M": 2, "GPT-2, 24 layers": 4}
LAYERS = {"GPT-2, 124 M": 12, "GPT-2, 24 layers": 24}
FACTORIES = {"GPT-2, 124 M": "of_12_layers", "GPT-2, 24 layers": "of_24_layers"}
VOCABULARY, MICROBATCHES, WORDS = 50257, 4, 64


def gpt2(case: str) -> nn.Module:
    """Without dropout."""
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS[case], use_cache=False, **none))


def of_12_layers() -> tuple[nn.Module, Callable[[], Any]]:
    """With a microbatch's step."""
    return _with_step("GPT-2, 124 M")


def of_24_layers() -> tuple[nn.Module, Callable[[], Any]]:
    """With a microbatch's step."""
    return _with_step("GPT-2, 24 layers")


def _with_step(case: str) -> tuple[nn.Module, Callable[[], Any]]:
    model = gpt2(case)
    ids = torch.randint(VOCABULARY, (1, WORDS))
    return model, lambda: model(ids, labels=ids).loss
