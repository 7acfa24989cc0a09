"""Variables of files and classes, such as caches of masks, that a run has filled with fake tensors.

Only those are put back. Restoring all of them would undo imports and counts, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from opensmd.modelparallel.compatibility.quirks import PLAIN_CONTAINERS, holds_fakes
from opensmd.modelparallel.runtime.side_effects.containers import content_of, set_content
from opensmd.modelparallel.runtime.side_effects.objects.libraries import is_installed, is_of_library

__all__ = ["KeptVariables"]


class KeptVariables:
    """A snapshot of the variables of the script's files and of the packages that a model's classes are from.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(holder, dict(vars(holder))) for holder in _holders(module)]
        containers = {
            id(value): value
            for _, variables in self._kept
            for name, value in variables.items()
            if type(value) in PLAIN_CONTAINERS and not name.startswith("__")
        }
        self._contents = [(each, content_of(each)) for each in containers.values()]

    def put_back(self) -> None:
        """Restore those that hold fake tensors."""
        for container, content in self._contents:
            if holds_fakes(container):
                set_content(container, content)
        for holder, before in self._kept:
            changed = {name for name, value in vars(holder).items() if value is not before.get(name)}
            for name in [name for name in changed if holds_fakes(vars(holder)[name])]:
                if name in before:
                    setattr(holder, name, before[name])
                else:
                    delattr(holder, name)


def _holders(module: nn.Module) -> Iterator[ModuleType | type]:
    """Yield files and classes, each once."""
    kinds = {kind for submodule in module.modules() for kind in type(submodule).__mro__}
    kinds = {kind for kind in kinds if not is_of_library(kind.__module__)}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    # A copy: while a list is made, a collection of garbage may run code that imports.
    for name, file in sys.modules.copy().items():
        if not isinstance(file, ModuleType) or is_of_library(name):
            continue
        if name.partition(".")[0] in packages or not is_installed(getattr(file, "__file__", None)):
            yield file
            kinds |= {kind for kind in vars(file).values() if _is_defined_in(kind, name)}
    yield from kinds


def _is_defined_in(value: Any, file: str) -> bool:
    return isinstance(value, type) and value.__module__ == file
