"""torchvision without its compiled operators, which PyPI's build for CUDA has and a CPU torch cannot load.

No model of the zoo calls them, but importing torchvision, and with it half of the other libraries, wants two
of them to be declared.
"""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["declare_operators"]

_KEPT: list[torch.library.Library] = []  # what is declared goes with its library


def declare_operators() -> None:
    """Declare what torchvision's import asks for, if torchvision is there and torch is built without CUDA."""
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
