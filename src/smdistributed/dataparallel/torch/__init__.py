"""The doors for PyTorch. Importing them tells torch.distributed what the launcher told this process.

The seed's text also names the v1 functions without ``.distributed``; they answer here too, when asked.
"""

import importlib

from opensmd.environment.variables import fill

__all__: list[str] = []

fill()


def __getattr__(name: str) -> object:
    if not name.startswith("_"):
        v1 = importlib.import_module("opensmd.dataparallel.distributed")
        if name in v1.__all__:
            return getattr(v1, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
