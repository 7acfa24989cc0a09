"""Importing torch with the garbage collector at rest, which every process of a job starts sooner for.

The import makes several hundred thousand objects that live as long as their process. Python's collector goes
through all of them again and again while they are made, in every full collection later, and once more when
the process ends: more than a quarter of what starting and ending a process with torch costs.
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
    """Let the first ``import torch``, wherever it comes, run without collections, and exempt what it made.

    Does nothing where torch has been imported already, or where the collector is switched off.
    """
    if NAME not in sys.modules and gc.isenabled():
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch once, where it would be found without this."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec with a loader that rests the collector; None for every other module."""
        if fullname != NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(NAME)
        if spec is not None and spec.loader is not None:
            spec.loader = _RestingLoader(spec.loader)
        return spec


class _RestingLoader(Loader):
    """Lets the usual loader do the work, and leaves no trace in the module."""

    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What the usual loader makes."""
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import torch; then exempt from collections all objects that there are, if there are collections."""
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
