"""The fused layer norm is torch's."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.nn import FusedLayerNorm


def test_fused_layer_norm_equals_torchs() -> None:
    x = torch.randn(3, 4, 5)
    for shape, affine in [(5, True), ((4, 5), False)]:
        ours = FusedLayerNorm(shape, eps=1e-3, elementwise_affine=affine)
        assert torch.equal(ours(x), nn.LayerNorm(shape, eps=1e-3, elementwise_affine=affine)(x))
