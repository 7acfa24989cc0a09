"""Models for pictures: timm, torchvision, segmentation-models-pytorch, monai, kornia, vit-pytorch."""

# mypy: ignore-errors
# these libraries are not there when the project is checked
from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.model import ROWS, Model

__all__ = ["MODELS"]

TIMM = [
    "resnet10t",
    "mobilenetv3_small_050",
    "mobilenetv2_035",
    "ghostnet_050",
    "regnetx_002",
    "regnety_002",
    "convnext_atto",
    "convnextv2_atto",
    "edgenext_xx_small",
    "efficientvit_b0",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mobileone_s0",
    "lcnet_050",
    "tinynet_e",
    "mnasnet_small",
    "spnasnet_100",
    "hardcorenas_a",
    "selecsls42",
    "dla46_c",
    "hrnet_w18_small",
    "inception_next_atto",
    "fastvit_t8",
    "repvit_m0_9",
    "rexnet_100",
    "tiny_vit_5m_224",
    "semnasnet_075",
    "pvt_v2_b0",
    "poolformer_s12",
    "densenet121",
    "res2net50_14w_8s",
    "skresnet18",
    "resnest14d",
    "gernet_s",
    "ese_vovnet19b_dw",
    "lambda_resnet26t",
    "mambaout_femto",
    "test_vit",
    "test_vit2",
    "test_resnet",
    "test_efficientnet",
    "test_convnext",
    "test_byobnet",
    "test_nfnet",
]
TIMM_OF_SIZE = [
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "xcit_nano_12_p16_224",
    "gmixer_12_224",
    "resmlp_12_224",
    "gmlp_ti16_224",
    "coat_lite_tiny",
    "crossvit_9_240",
    "convit_tiny",
    "mvitv2_tiny",
    "visformer_tiny",
    "efficientformerv2_s0",
    "botnet26t_256",
]
TORCHVISION = [
    "squeezenet1_0",
    "shufflenet_v2_x0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "resnet18",
    "mnasnet0_5",
    "regnet_y_400mf",
    "regnet_x_400mf",
    "densenet121",
    "segmentation.lraspp_mobilenet_v3_large",
    "segmentation.deeplabv3_mobilenet_v3_large",
]
SEGMENTATION = [
    "Unet",
    "UnetPlusPlus",
    "FPN",
    "Linknet",
    "PSPNet",
    "PAN",
    "DeepLabV3",
    "DeepLabV3Plus",
    "MAnet",
    "UPerNet",
    "Segformer",
]


def _pictures(step: int, side: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, channels, side, side, generator=torch.Generator().manual_seed(step))


def _of(build: Callable[[], nn.Module], argument: str, side: int = 64, channels: int = 3) -> Model:
    return Model(build=build, batch=lambda step: {argument: _pictures(step, side, channels)})


def _timm(name: str, side: int = 64, **options: Any) -> Model:
    def build() -> nn.Module:
        made = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=4, **options)
        with torch.no_grad():
            for parameter in made.parameters():  # zeros let no gradient through
                if parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(0, 0.02)
        return made

    def checkpoint(module: nn.Module) -> None:
        # every timm model has the method, some only to refuse
        with contextlib.suppress(AttributeError, AssertionError):
            module.set_grad_checkpointing()

    return Model(build=build, batch=lambda step: {"x": _pictures(step, side)}, checkpoint=checkpoint)


def _torchvision(name: str) -> Model:
    def build() -> nn.Module:
        package = importlib.import_module("torchvision.models")
        make = functools.reduce(getattr, name.split("."), package)
        more = {"weights_backbone": None} if "segmentation" in name else {}
        return make(weights=None, num_classes=4, **more)

    return _of(build, "input" if "lraspp" in name else "x")


def _torchvision_transformer(kind: str) -> Model:
    def build() -> nn.Module:
        package = importlib.import_module("torchvision.models")
        if kind == "vit":
            made = package.VisionTransformer(
                image_size=64,
                patch_size=16,
                num_layers=4,
                num_heads=2,
                hidden_dim=32,
                mlp_dim=64,
                num_classes=4,
            )
            nn.init.normal_(made.heads.head.weight)  # zeros at first, through which no gradient comes
            return made
        return package.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=4
        )

    return _of(build, "x")


def _segmentation(name: str) -> Model:
    def build() -> nn.Module:
        kind = getattr(importlib.import_module("segmentation_models_pytorch"), name)
        return kind(encoder_name="mobilenet_v2", encoder_weights=None, classes=2)

    return _of(build, "x", 128 if name == "PAN" else 64)


def _monai(name: str, *args: Any, side: int = 32, **options: Any) -> Model:
    def build() -> nn.Module:
        return getattr(importlib.import_module("monai.networks.nets"), name)(*args, **options)

    argument = {"UNETR": "x_in", "SwinUNETR": "x_in", "EfficientNetBN": "inputs", "FlexibleUNet": "inputs"}
    return _of(build, argument.get(name, "x"), side, 1)


def _kornia(path: str, side: int, channels: int, **options: Any) -> Model:
    def build() -> nn.Module:
        package, _, name = path.rpartition(".")
        return getattr(importlib.import_module(package), name)(**options)

    return _of(build, "x" if path.endswith(("HyNet", "VisionTransformer")) else "input", side, channels)


def _vit_pytorch(path: str, **options: Any) -> Model:
    def build() -> nn.Module:
        package, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"vit_pytorch{'.' if package else ''}{package}"), name)(
            **options
        )

    return _of(build, "x" if path.startswith(("crossformer", "cvt")) else "img", 32)


SMALL = {
    "dim": 32,
    "depth": 4,
    "heads": 2,
    "mlp_dim": 64,
    "num_classes": 4,
    "image_size": 32,
    "patch_size": 8,
}

MODELS: dict[str, dict[str, Callable[[], Model]]] = {
    "timm": {
        **{name: functools.partial(_timm, name) for name in TIMM},
        **{name: functools.partial(_timm, name, img_size=64) for name in TIMM_OF_SIZE},
        "halonet26t": lambda: _timm("halonet26t", 256),
    },
    "torchvision": {
        **{name: functools.partial(_torchvision, name) for name in TORCHVISION},
        **{name: functools.partial(_torchvision_transformer, name) for name in ("vit", "swin")},
    },
    "segmentation-models-pytorch": {name: functools.partial(_segmentation, name) for name in SEGMENTATION},
    "monai": {
        "UNet": lambda: _monai("UNet", 2, 1, 2, (4, 8, 16), (2, 2)),
        "BasicUNet": lambda: _monai("BasicUNet", 2, 1, 2, (4, 4, 8, 8, 16, 4)),
        "BasicUNetPlusPlus": lambda: _monai("BasicUNetPlusPlus", 2, 1, 2, (4, 4, 8, 8, 16, 4)),
        "SegResNet": lambda: _monai("SegResNet", 2, 8, 1, 2),
        "AttentionUnet": lambda: _monai("AttentionUnet", 2, 1, 2, (4, 8, 16), (2, 2)),
        "UNETR": lambda: _monai("UNETR", 1, 2, 32, 4, 32, 64, 2, spatial_dims=2),
        "SwinUNETR": lambda: _monai("SwinUNETR", 1, 2, feature_size=12, spatial_dims=2, side=64),
        "DenseNet121": lambda: _monai("DenseNet121", 2, 1, 2),
        "AutoEncoder": lambda: _monai("AutoEncoder", 2, 1, 1, (4, 8), (2, 2)),
        "HighResNet": lambda: _monai("HighResNet", 2, 1, 2),
        "ViT": lambda: _monai("ViT", 1, 32, 8, 32, 64, 4, 2, spatial_dims=2),
        "DynUNet": lambda: _monai("DynUNet", 2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], [4, 8, 16]),
        "EfficientNetBN": lambda: _monai("EfficientNetBN", "efficientnet-b0", False, True, 2, 1, 2),
        "VNet": lambda: _monai("VNet", 2, 1, 2),
        "FlexibleUNet": lambda: _monai("FlexibleUNet", 1, 2, "efficientnet-b0", spatial_dims=2),
        "ResNet": lambda: _monai("ResNet", "basic", [1, 1, 1, 1], [4, 8, 16, 32], 2, 1),
    },
    "kornia": {
        "HardNet": lambda: _kornia("kornia.feature.HardNet", 32, 1, pretrained=False),
        "SOSNet": lambda: _kornia("kornia.feature.SOSNet", 32, 1, pretrained=False),
        "TFeat": lambda: _kornia("kornia.feature.TFeat", 32, 1, pretrained=False),
        "HyNet": lambda: _kornia("kornia.feature.HyNet", 32, 1, pretrained=False),
        "VisionTransformer": lambda: _kornia(
            "kornia.models.vit.VisionTransformer",
            32,
            3,
            image_size=32,
            patch_size=8,
            embed_dim=32,
            depth=4,
            num_heads=2,
        ),
    },
    "vit-pytorch": {
        "ViT": lambda: _vit_pytorch("ViT", **SMALL),
        "SimpleViT": lambda: _vit_pytorch("simple_vit.SimpleViT", **SMALL),
        "DeepViT": lambda: _vit_pytorch("deepvit.DeepViT", **SMALL),
        "CaiT": lambda: _vit_pytorch("cait.CaiT", cls_depth=2, **SMALL),
        "LookViT": lambda: _vit_pytorch("simple_vit_with_register_tokens.SimpleViT", **SMALL),
        "PatchDropout": lambda: _vit_pytorch("simple_vit_with_qk_norm.SimpleViT", **SMALL),
        "ParallelViT": lambda: _vit_pytorch("parallel_vit.ViT", **SMALL),
        "LearnableMemory": lambda: _vit_pytorch("vit_for_small_dataset.ViT", **SMALL),
        "CrossFormer": lambda: _vit_pytorch(
            "crossformer.CrossFormer",
            dim=(8, 16, 16, 32),
            depth=(1, 1, 1, 1),
            num_classes=4,
            global_window_size=(1, 1, 1, 1),
            local_window_size=1,
        ),
        "CvT": lambda: _vit_pytorch(
            "cvt.CvT", num_classes=4, s1_emb_dim=8, s2_emb_dim=16, s3_emb_dim=32, s3_depth=2
        ),
    },
}
