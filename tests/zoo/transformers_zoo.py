"""Architectures of transformers: for each model type one class that computes a loss, tiny, and its inputs."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from tests.zoo.model import ROWS, Model
from tests.zoo.tiny_configs import VOCABULARY, tiny

__all__ = ["candidates", "make"]

WORDS = 12
MOST_PARAMETERS = 3_000_000
LISTS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
)


def candidates() -> Iterator[str]:
    """Model types, in alphabetical order: those that have trained when tiny, in plain PyTorch."""
    yield from Path(__file__).with_name("transformers.txt").read_text().split()


def make(model_type: str) -> Model:
    """The tiny model of a type.

    Raises:
        Exception: whatever the configuration or the model says of its tiny numbers.
    """
    kind = _class_of(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(_config(model_type)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are not tiny")

    def build() -> nn.Module:
        module: nn.Module = kind(_config(model_type)).float().train()
        return module

    return Model(
        build=build, batch=lambda step: _inputs(kind, step), load=_reloaded, checkpoint=_checkpointed
    )


def _class_of(model_type: str) -> Any:
    for inner in LISTS:
        found = getattr(modeling_auto, inner).get(model_type)
        if found is not None:
            return getattr(transformers, found if isinstance(found, str) else found[0])
    raise KeyError(model_type)


def _config(model_type: str) -> Any:
    return tiny(transformers.CONFIG_MAPPING[model_type]())


def _inputs(kind: Any, step: int) -> dict[str, Any]:
    """What the forward takes, by the names of its parameters."""
    generator = torch.Generator().manual_seed(step)
    taken = inspect.signature(kind.forward).parameters
    words = torch.randint(4, VOCABULARY, (ROWS, WORDS), generator=generator)
    if kind.main_input_name == "pixel_values":
        pictures = torch.randn(ROWS, 3, 32, 32, generator=generator)
        return {"pixel_values": pictures, **_labels(taken, torch.randint(2, (ROWS,), generator=generator))}
    if kind.main_input_name == "input_values":
        sound = torch.randn(ROWS, 2000, generator=generator)
        return {"input_values": sound, **_labels(taken, words[:, :2] // 4)}
    if kind.main_input_name == "input_features":
        sound = torch.randn(ROWS, 16, 80, generator=generator)
        return {"input_features": sound, **_labels(taken, words[:, :2] // 4)}
    return {"input_ids": words, "attention_mask": torch.ones_like(words), **_labels(taken, words)}


def _labels(taken: Any, labels: Tensor) -> dict[str, Tensor]:
    return {"labels": labels} if "labels" in taken else {}


def _reloaded(module: Any) -> nn.Module:
    """The model as ``from_pretrained`` makes it: its weights lie in a mapped safetensors file."""
    module.should_save_on_this_rank = lambda _: True  # each rank has a folder of its own
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        assert any(Path(folder).glob("*.safetensors"))
        loaded: nn.Module = type(module).from_pretrained(folder, attn_implementation="eager").train()
        return loaded


def _checkpointed(module: Any) -> None:
    if getattr(module, "supports_gradient_checkpointing", False):
        module.gradient_checkpointing_enable()
