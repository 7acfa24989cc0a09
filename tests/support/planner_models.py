"""Models for the planner's tests: tiny Hugging Face ones, a ResNet-style one, and awkward little ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, Callable[[], Any]]

VOCABULARY = 500


def tokens() -> Tensor:
    return torch.arange(16 * 64).reshape(16, 64) % VOCABULARY


def gpt2(layers: int = 4, width: int = 256) -> Case:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    ids = tokens()
    return model, lambda: model(input_ids=ids, labels=ids).loss


def bert() -> Case:
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=1024,
            vocab_size=VOCABULARY,
        )
    )
    ids = tokens()
    following = torch.zeros(16, dtype=torch.long)
    return model, lambda: model(input_ids=ids, labels=ids, next_sentence_label=following).loss


def t5() -> Case:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=3,
            d_model=256,
            d_kv=32,
            num_heads=4,
            d_ff=1024,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,  # type: ignore[call-arg]  # a generation setting
        )
    )
    ids = tokens()
    return model, lambda: model(input_ids=ids, labels=ids).loss


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride=stride) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network with three widths."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        layers: list[nn.Module] = []
        for channels, out in ((32, 32), (32, 64), (64, 128)):
            layers.append(Residual(channels, out, 1 if channels == out else 2))
            layers.extend(Residual(out, out) for _ in range(blocks - 1))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


def resnet() -> Case:
    model = ResNet()
    images = torch.ones(8, 3, 32, 32)
    return model, lambda: F.cross_entropy(model(images), torch.zeros(8, dtype=torch.long))


def llama() -> Case:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=512,
            vocab_size=VOCABULARY,
        )
    )
    ids = tokens()
    return model, lambda: model(input_ids=ids, labels=ids).loss


def vit() -> Case:
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=512,
            image_size=64,
            patch_size=8,
            num_labels=10,  # type: ignore[call-arg]  # a setting of all configurations
        )
    )
    images = torch.ones(16, 3, 64, 64)
    return model, lambda: model(pixel_values=images, labels=torch.zeros(16, dtype=torch.long)).loss


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
    "llama": llama,
    "vit": vit,
}
