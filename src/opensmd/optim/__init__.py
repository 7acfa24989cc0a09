"""Fused optimizers: apex's where it and a GPU are present, otherwise the same rules as foreach operations.

Begin with ``fused``, which all of them build on. Imports nothing else of the package.
"""

from __future__ import annotations

from typing import Any

import torch

from opensmd.optim.adam import FusedAdam as _Adam
from opensmd.optim.lamb import FusedLAMB as _LAMB
from opensmd.optim.novograd import FusedNovoGrad as _NovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedNovoGrad"]


def _apex(name: str) -> Any:
    """apex's class, or None if apex or a GPU is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        from apex import optimizers
    except ImportError:
        return None
    return getattr(optimizers, name, None)


FusedAdam: Any = _apex("FusedAdam") or _Adam
FusedLAMB: Any = _LAMB  # apex's takes the norm of one rank's gradients alone, which is wrong in partitions
FusedNovoGrad: Any = _apex("FusedNovoGrad") or _NovoGrad
