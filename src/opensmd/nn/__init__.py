"""Fused modules: apex's where it and a GPU are present, otherwise torch's own kernels."""

from opensmd.nn.layer_norm import FusedLayerNorm

__all__ = ["FusedLayerNorm"]
