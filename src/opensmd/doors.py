"""The doors to names torch once had: ``torch.distributed.deprecated`` and ``torch.nn.parallel.deprecated``.

torch itself calls :func:`open_doors` at the end of ``import torch`` (entry point group ``torch.backends``),
so this file imports nothing that is not loaded anyway. The same call lets torch know the name "smddp". A door
is an alias: the module behind the old name *is* the room in opensmd, one object under two names.
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

__all__ = ["open_doors"]

DOORS = {
    "torch.distributed.deprecated": "opensmd.legacy",
    "torch.nn.parallel.deprecated": "opensmd.legacy.parallel",
}


class DoorLoader(Loader):
    """Loads a module by lending it another module's object."""

    def __init__(self, room: ModuleSpec) -> None:
        self._room = room

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the import system make an empty module; :meth:`exec_module` replaces it."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the room's own module under the door's name."""
        import_module("opensmd.tested_torch").warn_if_untested()
        sys.modules[module.__name__] = import_module(self._room.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The room's code, which ``python -m`` runs."""
        assert isinstance(self._room.loader, InspectLoader)
        return self._room.loader.get_code(self._room.name)


class DoorFinder(MetaPathFinder):
    """Finds the doors and what lies behind them, unless torch itself has a module of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a door, or None for every other name."""
        if not fullname.startswith("torch.") or ".deprecated" not in fullname:
            return None
        for door, room in DOORS.items():
            if fullname == door:
                return None if _torch_has(fullname, path) else _spec(fullname, room)
            if fullname.startswith(door + ".") and sys.modules.get(door) is sys.modules.get(room):
                return _spec(fullname, room + fullname[len(door) :])
        return None


def _spec(fullname: str, room: str) -> ModuleSpec | None:
    found = find_spec(room)
    if found is None or found.loader is None:
        return None
    spec = ModuleSpec(fullname, DoorLoader(found), origin=found.origin)
    spec.has_location = found.has_location
    spec.submodule_search_locations = found.submodule_search_locations
    return spec


def open_doors() -> None:
    """Let the old names be imported, and be reached as attributes of a torch that is already imported,
    and ``init_process_group("smddp")`` be called without an import of this package.

    Does nothing where it has been called before.
    """
    if any(isinstance(finder, DoorFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, DoorFinder())
    make_known()
    for door in DOORS:
        house = sys.modules.get(door.rpartition(".")[0])
        if house is not None and not hasattr(house, "__getattr__") and not _torch_has(door, house.__path__):
            _answer_for_deprecated(house)


def _torch_has(door: str, path: Sequence[str] | None) -> bool:
    return PathFinder.find_spec(door, path) is not None


def _answer_for_deprecated(house: ModuleType) -> None:
    """Scripts of the time wrote ``torch.nn.parallel.deprecated.X`` after a bare ``import torch``."""
    # torch.nn.parallel still holds a decorator of this name, which it has used up when it is loaded
    vars(house).pop("deprecated", None)

    def attribute(name: str) -> ModuleType:
        if name == "deprecated":
            return import_module(f"{house.__name__}.deprecated")
        raise AttributeError(f"module {house.__name__!r} has no attribute {name!r}")

    house.__getattr__ = attribute  # type: ignore[method-assign]
