"""torchvision without its compiled operators, which PyPI's build for CUDA has and a CPU torch cannot load.

No model of the zoo calls them, but importing torchvision, and with it half of the other libraries, wants two
of them to be declared.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

__all__ = ["declare_operators"]

_KEPT: list[torch.library.Library] = []  # what is declared goes with its library


def declare_operators() -> None:
    """Declare what importing torchvision asks for, where its own operators cannot be loaded."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        for compiled in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(compiled))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
