"""Importing torch without garbage collection, so that every process of a job starts faster.

The import creates several hundred thousand objects that live as long as the process. Python's collector would
scan all of them repeatedly during the import, in every full collection later, and again when the process
ends: more than a quarter of the cost of starting and ending a process with torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["without_collector"]

NAME = "torch"


def without_collector() -> None:
    """Run the first ``import torch``, wherever it comes, without collections, and exempt its objects.

    Does nothing if torch has already been imported or the collector is off.
    """
    if NAME not in sys.modules and gc.isenabled():
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch once, where Python would find it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's usual spec with a loader that pauses the collector; None for every other module."""
        if fullname != NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(NAME)
        if spec is not None and spec.loader is not None:
            spec.loader = _RestingLoader(spec.loader)
        return spec


class _RestingLoader(Loader):
    """Delegates to the usual loader, and leaves no trace in the module."""

    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the usual loader."""
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import torch, then exempt all existing objects from collection, unless the collector is off."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._usual
        if not gc.isenabled():
            self._usual.exec_module(module)
            return
        gc.disable()
        try:
            self._usual.exec_module(module)
            gc.freeze()
        finally:
            gc.enable()
