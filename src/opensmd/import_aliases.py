"""Import aliases for what torch had: ``torch.distributed.deprecated`` and ``torch.nn.parallel.deprecated``.

torch itself calls :func:`install` at the end of ``import torch`` (entry point group ``torch.backends``),
so this file imports nothing that is not loaded anyway. The same call makes the backend name "smddp" known to
torch. The module under the old name *is* the one in opensmd: one object with two names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CodeType, ModuleType

from opensmd.collectives.lookup import make_known

__all__ = ["install"]

ALIASES = {
    "torch.distributed.deprecated": "opensmd.legacy",
    "torch.nn.parallel.deprecated": "opensmd.legacy.parallel",
}


class AliasLoader(Loader):
    """Loads a module by giving its name to another module."""

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the import system create an empty module, which :meth:`exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the target's own module under the alias."""
        import_module("opensmd.tested_torch").warn_if_untested()
        sys.modules[module.__name__] = import_module(self._target.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the target's code for ``python -m``."""
        assert isinstance(self._target.loader, InspectLoader)
        return self._target.loader.get_code(self._target.name)


class AliasFinder(MetaPathFinder):
    """Finds the aliases and their submodules, unless torch itself has a module of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias, or None for every other name."""
        if not fullname.startswith("torch.") or ".deprecated" not in fullname:
            return None
        for alias, aliased in ALIASES.items():
            if fullname == alias:
                return None if _torch_has(fullname, path) else _spec(fullname, aliased)
            if fullname.startswith(alias + ".") and sys.modules.get(alias) is sys.modules.get(aliased):
                return _spec(fullname, aliased + fullname[len(alias) :])
        return None


def _spec(fullname: str, aliased: str) -> ModuleSpec | None:
    original = find_spec(aliased)
    if original is None or original.loader is None:
        return None
    spec = ModuleSpec(fullname, AliasLoader(original), origin=original.origin)
    spec.has_location = original.has_location
    spec.submodule_search_locations = original.submodule_search_locations
    return spec


def install() -> None:
    """Make the old names importable, and ``init_process_group("smddp")`` work without importing this package.

    In a torch that is already imported, the old names become attributes. A second call does nothing.
    """
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AliasFinder())
    make_known()
    for alias in ALIASES:
        package = sys.modules.get(alias.rpartition(".")[0])
        if package is None or hasattr(package, "__getattr__") or _torch_has(alias, package.__path__):
            continue
        _answer_for_deprecated(package)


def _torch_has(name: str, path: Sequence[str] | None) -> bool:
    return PathFinder.find_spec(name, path) is not None


def _answer_for_deprecated(package: ModuleType) -> None:
    """Scripts of the time wrote ``torch.nn.parallel.deprecated.X`` after a bare ``import torch``."""
    # torch.nn.parallel still holds a decorator of this name, which it has used up when it is loaded
    vars(package).pop("deprecated", None)

    def attribute(name: str) -> ModuleType:
        if name == "deprecated":
            return import_module(f"{package.__name__}.deprecated")
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    package.__getattr__ = attribute  # type: ignore[method-assign]
