"""Which classes and functions belong to libraries that keep nothing of a forward in their objects."""

from __future__ import annotations

import sys

__all__ = ["is_of_library"]

_LIBRARIES = sys.stdlib_module_names | {"numpy", "opensmd", "smdistributed", "torch"}


def is_of_library(module: object) -> bool:
    """Whether what ``module`` defines is of the standard library, torch, NumPy or this package."""
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES
