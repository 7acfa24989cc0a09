"""Models of diffusers and torch_geometric, and of torch's own modules."""

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

WIDTH = 32


def _random(step: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(step))


TIMES = torch.arange(ROWS)


def _diffusers(name: str, inputs: dict[str, tuple[int, ...]], **options: Any) -> Model:
    def build() -> nn.Module:
        made = getattr(importlib.import_module("diffusers"), name)(**options)
        with torch.no_grad():
            for parameter in made.parameters():  # those that begin with zeros hide the others
                if not parameter.any():
                    parameter.normal_(0, 0.02)
        return made

    def batch(step: int) -> dict[str, Any]:
        given = {item: _random(step + place, *shape) for place, (item, shape) in enumerate(inputs.items())}
        return given if "Autoencoder" in name or name == "VQModel" else {**given, "timestep": TIMES}

    def checkpoint(module: nn.Module) -> None:
        if module._supports_gradient_checkpointing:
            module.enable_gradient_checkpointing()

    return Model(build=build, batch=batch, checkpoint=checkpoint)


UNET = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
CODER = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}
PICTURE = (3, 16, 16)
LATENT = (4, 16, 16)

DIFFUSERS: dict[str, Callable[[], Model]] = {
    "UNet2D": lambda: _diffusers(
        "UNet2DModel",
        {"sample": PICTURE},
        **UNET,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet2DCondition": lambda: _diffusers(
        "UNet2DConditionModel",
        {"sample": LATENT, "encoder_hidden_states": (5, 16)},
        **UNET,
        **CROSS,
        cross_attention_dim=16,
        attention_head_dim=4,
    ),
    "AutoencoderKL": lambda: _diffusers("AutoencoderKL", {"sample": PICTURE}, **CODER),
    "VQModel": lambda: _diffusers("VQModel", {"sample": PICTURE}, **CODER, num_vq_embeddings=16),
    "AutoencoderTiny": lambda: _diffusers(
        "AutoencoderTiny",
        {"sample": PICTURE},
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    "PixArt": lambda: _diffusers(
        "PixArtTransformer2DModel",
        {"hidden_states": LATENT, "encoder_hidden_states": (5, 16)},
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=8,
        sample_size=16,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    "SD3": lambda: _diffusers(
        "SD3Transformer2DModel",
        {"hidden_states": LATENT, "encoder_hidden_states": (5, 16), "pooled_projections": (16,)},
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=8,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    ),
    "Sana": lambda: _diffusers(
        "SanaTransformer2DModel",
        {"hidden_states": LATENT, "encoder_hidden_states": (5, 16)},
        in_channels=4,
        out_channels=4,
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=16,
    ),
}

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 4, 5, 0, 0, 1]])


class _Graphs(nn.Module):
    """A graph network over many graphs of one shape, and a mean over their nodes."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        package = importlib.import_module("torch_geometric.nn")
        self.net = getattr(package, name)(WIDTH, 16, 4, 8, **options)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        count, nodes, _ = x.shape
        shift = torch.arange(count).repeat_interleave(edges.shape[1]) * nodes
        return self.net(x.flatten(0, 1), edges.repeat(1, count) + shift).view(count, nodes, -1).mean(1)


class _Dense(nn.Module):
    """Dense graph convolutions with a pool between them."""

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("torch_geometric.nn")
        self.first = package.DenseGCNConv(WIDTH, 16)
        self.pool = package.DenseGCNConv(WIDTH, 3)
        self.second = package.DenseSAGEConv(16, 8)
        self.diffuse = package.dense_diff_pool

    def forward(self, x: Tensor, adjacent: Tensor) -> tuple[Tensor, Tensor]:
        h, adjacent, loss, _ = self.diffuse(self.first(x, adjacent).relu(), adjacent, self.pool(x, adjacent))
        return self.second(h, adjacent), loss


def _graphs(name: str, **options: Any) -> Model:
    return Model(
        build=lambda: _Graphs(name, **options),
        batch=lambda step: {"x": _random(step, 6, WIDTH), "edges": EDGES},
    )


def _dense() -> Model:
    return Model(
        build=_Dense,
        batch=lambda step: {"x": _random(step, 6, WIDTH), "adjacent": _random(step, 6, 6).relu()},
    )


GEOMETRIC: dict[str, Callable[[], Model]] = {
    **{name: functools.partial(_graphs, name) for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")},
    "GATv2": lambda: _graphs("GAT", v2=True),
    "GCN with jumps": lambda: _graphs("GCN", jk="cat"),
    "GCN with norms": lambda: _graphs("GCN", norm="batch_norm"),
    "pooled": _dense,
}


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = getattr(nn, kind)(WIDTH, 16, batch_first=True, num_layers=2)
        self.second = getattr(nn, kind)(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)[0])[0][:, -1])


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y)


class _Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.body(x), y).output


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = []
    for channels in (3, 8, 16, 16):
        parts += [
            nn.Conv2d(channels, 8 if channels == 3 else 16, 3, padding=1),
            norm(8 if channels == 3 else 16),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def _normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*[one for _ in range(4) for one in (norm(nn.Linear(WIDTH, WIDTH)), nn.GELU())])


def _plain(build: Callable[[], nn.Module], **shapes: tuple[int, ...]) -> Model:
    return Model(
        build=build,
        batch=lambda step: {
            name: _random(step + place, *shape) for place, (name, shape) in enumerate(shapes.items())
        },
    )


TORCH: dict[str, Callable[[], Model]] = {
    "TransformerEncoder": lambda: _plain(_encoder, src=(6, WIDTH)),
    "TransformerEncoder, norm first": lambda: _plain(lambda: _encoder(norm_first=True), src=(6, WIDTH)),
    "Transformer": lambda: _plain(_Both, x=(6, WIDTH), y=(5, WIDTH)),
    "LSTM": lambda: _plain(lambda: _Recurrent("LSTM"), x=(6, WIDTH)),
    "GRU": lambda: _plain(lambda: _Recurrent("GRU"), x=(6, WIDTH)),
    "RNN": lambda: _plain(lambda: _Recurrent("RNN"), x=(6, WIDTH)),
    "BatchNorm": lambda: _plain(lambda: _convolutions(nn.BatchNorm2d), input=(3, 16, 16)),
    "InstanceNorm": lambda: _plain(
        lambda: _convolutions(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
        input=(3, 16, 16),
    ),
    "GroupNorm": lambda: _plain(lambda: _convolutions(lambda n: nn.GroupNorm(4, n)), input=(3, 16, 16)),
    "weight norm": lambda: _plain(lambda: _normed(nn.utils.parametrizations.weight_norm), input=(WIDTH,)),
    "spectral norm": lambda: _plain(lambda: _normed(nn.utils.parametrizations.spectral_norm), input=(WIDTH,)),
    "orthogonal": lambda: _plain(lambda: _normed(nn.utils.parametrizations.orthogonal), input=(WIDTH,)),
    "adaptive softmax": lambda: Model(
        build=_Adaptive, batch=lambda step: {"x": _random(step, WIDTH), "y": torch.arange(ROWS) * 2}
    ),
}

MODELS = {"diffusers": DIFFUSERS, "torch_geometric": GEOMETRIC, "torch": TORCH}
