"""Modules whose class has a hash of its own: that of torchmetrics' metrics changes with each update.

Modules of a split model are looked up in dicts and sets, where one whose hash has changed is not found.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["hash_by_identity"]


def hash_by_identity(model: nn.Module) -> None:
    """Give the classes of a model's modules, but not those that they extend, the hash that modules have."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in kinds:
        if kind.__hash__ is not object.__hash__:
            kind.__hash__ = object.__hash__
