"""Fused modules: apex's where it and a GPU are present, otherwise torch's own kernels.

Begin with ``layer_norm``. Imports nothing else of the package.
"""

from opensmd.nn.layer_norm import FusedLayerNorm

__all__ = ["FusedLayerNorm"]
