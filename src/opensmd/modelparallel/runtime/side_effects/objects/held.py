"""What an object holds that is no module: attributes, variables of a closure, or globals of a file.

Objects are compared by identity, whatever their classes define, and are not kept alive: many belong to a
single forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any

from opensmd.modelparallel.runtime.side_effects.objects.counted import counted_by

__all__ = ["Held", "HeldGlobals", "HeldVariables", "held", "is_filled"]


class Held:
    """Something with named values.

    Args:
        path: how it is reached, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_split = False  # whether it is reached from a module that runs piece by piece, or from several

    @property
    def values(self) -> Mapping[str, Any]:
        """What it holds now."""
        raise NotImplementedError

    def put(self, name: str, value: Any) -> None:
        """Set a value without triggering anything."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a value, if there is one."""
        raise NotImplementedError

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set all values, and remove all others."""
        for name in [name for name in self.values if name not in values]:
            self.remove(name)
        for name, value in values.items():
            if self.values.get(name) is not value:
                self.put(name, value)

    @property
    def is_gone(self) -> bool:
        """Whether the object is no more."""
        return False

    @property
    def counted(self) -> Collection[str]:
        """The names of what its code adds to."""
        return ()

    def describes_process(self, name: str) -> bool:
        """Whether a number there is most likely about the process (calls of all instances)."""
        return False


class HeldAttributes(Held):
    """The attributes of an object, in its ``__dict__``, its ``__slots__`` or both."""

    def __init__(self, value: object, path: str) -> None:
        super().__init__(path)
        self._kind: Any = type(value)
        self._slots = _slots(self._kind)
        self._has_dict = hasattr(value, "__dict__")
        self._value = _reference(value)

    @property
    def values(self) -> Mapping[str, Any]:
        value = self._value()
        if value is None:
            return {}
        attributes: dict[str, Any] = vars(value) if self._has_dict else {}
        if not self._slots:
            return attributes
        return {
            **attributes,
            **{name: slot.__get__(value) for name, slot in self._slots.items() if _is_set(slot, value)},
        }

    def put(self, name: str, value: Any) -> None:
        owner = self._value()
        if owner is None:
            return
        if name in self._slots:
            self._slots[name].__set__(owner, value)
        else:
            vars(owner)[name] = value

    def remove(self, name: str) -> None:
        owner = self._value()
        if owner is None:
            return
        if name not in self._slots:
            vars(owner).pop(name, None)
        elif _is_set(self._slots[name], owner):
            self._slots[name].__delete__(owner)

    @property
    def is_gone(self) -> bool:
        return self._value() is None

    @property
    def counted(self) -> Collection[str]:
        return counted_by(self._kind)


class HeldVariables(Held):
    """The variables of outer functions that a function uses."""

    def __init__(self, function: FunctionType, path: str) -> None:
        super().__init__(path)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells: dict[str, CellType] = {name: cell for name, cell in cells if name != "__class__"}
        self._function = weakref.ref(function)

    @property
    def values(self) -> Mapping[str, Any]:
        return {name: cell.cell_contents for name, cell in self._cells.items() if is_filled(cell)}

    def put(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def remove(self, name: str) -> None:
        if is_filled(self._cells[name]):
            del self._cells[name].cell_contents

    @property
    def is_gone(self) -> bool:
        return self._function() is None


class HeldGlobals(Held):
    """Those globals of a file that the code of modules names, and of these the ones that it adds to."""

    def __init__(
        self, variables: dict[str, Any], names: Iterable[str], path: str, counted: Collection[str]
    ) -> None:
        super().__init__(path)
        self._globals = variables
        self._names = set(names)
        self._counted = counted

    def describes_process(self, name: str) -> bool:
        return name in self._counted

    @property
    def values(self) -> Mapping[str, Any]:
        return {name: self._globals[name] for name in self._names if name in self._globals}

    def put(self, name: str, value: Any) -> None:
        self._globals[name] = value

    def remove(self, name: str) -> None:
        self._globals.pop(name, None)


def held(value: Any, path: str = "") -> HeldAttributes | HeldVariables:
    """Return what an object, or a function with a closure, holds."""
    return HeldVariables(value, path) if isinstance(value, FunctionType) else HeldAttributes(value, path)


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    return {
        name: slot
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    }


def _reference(value: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(value)
    except TypeError:  # __slots__ without __weakref__
        return lambda: value


def _is_set(slot: MemberDescriptorType, value: object) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def is_filled(cell: CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018  # raises for an empty one
    except ValueError:
        return False
    return True
