"""The data-parallel library for PyTorch; importing it gives torch.distributed the launcher's variables.

SageMaker's documentation also writes the v1 functions without ``.distributed``, so they are found here, too.
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
