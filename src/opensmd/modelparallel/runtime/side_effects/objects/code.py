"""Which globals, and attributes of classes themselves, the code of a model's modules uses.

Read from the names in the code of methods, and of the functions and classes of the script that they name.
Code in installed packages does not count: it has many globals, and keeps nothing there between modules.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from opensmd.modelparallel.runtime.side_effects.objects.classes import HeldClassAttributes
from opensmd.modelparallel.runtime.side_effects.objects.counted import (
    added_to,
    carried_by,
    functions_in,
    stored_by,
)
from opensmd.modelparallel.runtime.side_effects.objects.held import (
    Held,
    HeldGlobals,
    HeldVariables,
    is_filled,
)
from opensmd.modelparallel.runtime.side_effects.objects.libraries import is_installed, is_of_library

__all__ = ["Used", "used_by"]


class Used:
    """What code uses outside of objects.

    Attributes:
        globals: those of files whose code is used, by the name of the file's module.
        names: which of them are used.
        closures: functions that use variables of outer ones.
        classes: those of the script whose code is used.
        stored: names of attributes that code sets, of something other than ``self``.
        counted: names to which code adds.
        carried: names of attributes that code sets after a look at what they were.
    """

    def __init__(self) -> None:
        self.globals: dict[str, dict[str, Any]] = {}
        self.names: dict[str, set[str]] = defaultdict(set)
        self.closures: dict[FunctionType, None] = {}
        self.classes: dict[type, None] = {}
        self.stored: set[str] = set()
        self.counted: set[str] = set()
        self.carried: set[str] = set()
        self._seen: set[Any] = set()

    def add(self, other: Used) -> None:
        """Add what other code uses."""
        self.globals |= other.globals
        self.closures |= other.closures
        self.classes |= other.classes
        self.stored |= other.stored
        self.counted |= other.counted
        self.carried |= other.carried
        for module, names in other.names.items():
            self.names[module] |= names

    def held(self) -> list[Held]:
        """Return all of it."""
        files = [
            HeldGlobals(self.globals[module], sorted(names), module, self.counted & names)
            for module, names in self.names.items()
        ]
        closures = [HeldVariables(each, each.__qualname__) for each in self.closures]
        classes = [
            HeldClassAttributes(kind, self.stored, self.counted | self.carried) for kind in self.classes
        ]
        return [*files, *closures, *filter(None, classes)]

    def read_class(self, kind: type) -> None:
        """Add what the methods of a class use."""
        for base in kind.__mro__:
            if base not in self._seen and _is_of_script(base.__module__, base):
                self._seen.add(base)
                self.classes[base] = None
                for function in functions_in(vars(base).values()):
                    self.read(function)

    def read(self, function: FunctionType) -> None:
        """Add what a function uses."""
        if function in self._seen:
            return
        self._seen.add(function)
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, FunctionType):
            self.read(inner)  # a decorator has its name and module, but mostly not its file
        if not _is_of_script(function.__globals__.get("__name__"), function):
            return
        names = set(_names(function.__code__))
        self.counted.update(added_to(function.__code__))
        self.carried.update(carried_by(function.__code__))
        self.stored.update(stored_by(function.__code__))
        self._look_up(names, function.__globals__, names)
        values = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        for value in values:
            self._follow(value)
        if not all(isinstance(value, (type, FunctionType, ModuleType, nn.Module)) for value in values):
            self.closures[function] = None

    def _look_up(self, names: set[str], variables: dict[str, Any], inner: set[str]) -> None:
        module = variables.get("__name__", "")
        for name in sorted(names & variables.keys()):  # in the same order on all ranks
            value = variables[name]
            if self._follow(value):
                continue
            if isinstance(value, ModuleType):
                if id(value) not in self._seen and _is_of_script(value.__name__, value):
                    self._seen.add(id(value))
                    self._look_up(inner, vars(value), set())
            elif not isinstance(value, nn.Module):
                self.globals[module] = variables
                self.names[module].add(name)

    def _follow(self, value: Any) -> bool:
        """Read a function or class; return whether it is one."""
        if isinstance(value, FunctionType):
            self.read(value)
        elif isinstance(value, type):
            self.read_class(value)
        return isinstance(value, (FunctionType, type))


def used_by(kinds: Iterable[type]) -> Used:
    """Return what the methods of modules' classes use."""
    used = Used()
    for kind in kinds:
        used.add(_used_by_one(kind))
    return used


@functools.lru_cache(maxsize=1024)
def _used_by_one(kind: type) -> Used:
    used = Used()
    used.read_class(kind)
    return used


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_script(module: Any, value: Any) -> bool:
    if is_of_library(module):
        return False
    file = value.__code__.co_filename if isinstance(value, FunctionType) else _file(module)
    return not is_installed(file)


def _file(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "")
