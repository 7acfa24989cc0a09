"""The models that are trained at all degrees, their batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "ROWS", "Model"]

ROWS = 16  # of the whole job's batch: eight replicas with two microbatches each
WIDTH, WORDS, VOCABULARY, LAYERS = 16, 6, 37, 4  # the vocabulary's slices differ in size
PLAIN = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Model:
    """A model, and what it is trained with.

    Attributes:
        batch: by the number of the step.
        loss: of the model, or what calls it, and a batch.
        by_block: where it is sharded on one partition, blocks are gathered one by one, and twice a step.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Callable[[Callable[..., Any], Tensor], Tensor]
    by_block: bool


def mlp() -> nn.Module:
    """Blocks with norms, between two linears."""
    blocks = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(LAYERS)
    ]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 2))


def gpt2() -> nn.Module:
    """With tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds; not every rank needs it

    sizes = {"n_layer": LAYERS, "n_head": 2, "n_embd": WIDTH, "n_positions": 8, "vocab_size": VOCABULARY}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **PLAIN))


def llama() -> nn.Module:
    """With grouped queries and rotary embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "max_position_embeddings": 8}
    layers = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=None, **sizes, **layers, **PLAIN))


def _numbers(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def _ids(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, WORDS), generator=torch.Generator().manual_seed(step))


def _squares(model: Callable[..., Any], x: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), x[:, :2].sin())


def _language(model: Callable[..., Any], ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


MODELS = {
    "MLP": Model(mlp, _numbers, _squares, by_block=True),
    "GPT-2": Model(gpt2, _ids, _language, by_block=True),
    "Llama": Model(llama, _ids, _language, by_block=False),
}
