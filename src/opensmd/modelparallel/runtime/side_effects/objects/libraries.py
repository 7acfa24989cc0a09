"""Which classes and functions belong to libraries that keep nothing of a forward in their objects.

Others that are installed do, but hardly in variables of their files.
"""

from __future__ import annotations

import sys

__all__ = ["is_installed", "is_of_library"]

_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = sys.stdlib_module_names | {"numpy", "opensmd", "smdistributed", "torch"}


def is_of_library(module: object) -> bool:
    """Whether what ``module`` defines is of the standard library, torch, NumPy or this package."""
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


def is_installed(file: str | None) -> bool:
    """Whether a file is of an installed package."""
    return any(folder in (file or "") for folder in _INSTALLED)
