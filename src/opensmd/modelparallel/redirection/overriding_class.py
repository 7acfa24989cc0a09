"""Objects whose class becomes one in which other methods override its own, whatever its bases are.

CPython lets an object change to a class with the same fields that begins with the same base. A mixin in front
of a class that begins with one without fields of its own (``class Adam(ABC, Optimizer)``, ``Generic``) is
another beginning: such a class is derived from the object's alone, and its metaclass puts the mixins in front
in the order in which methods are looked up.
"""

from __future__ import annotations

from typing import Any

__all__ = ["override"]


def override(thing: Any, mixins: tuple[type, ...]) -> None:
    """Give ``thing`` a class of the same name in which methods of ``mixins`` precede those of its own."""
    kind: Any = type(thing)
    namespace = {"__module__": kind.__module__}
    try:
        thing.__class__ = type(kind.__name__, (*mixins, kind), namespace)
    except TypeError:
        thing.__class__ = _in_front(kind, mixins)(kind.__name__, (kind,), namespace)


def _in_front(kind: type, mixins: tuple[type, ...]) -> type:
    """The metaclass of a class derived from ``kind`` that looks methods up in ``mixins`` first."""
    mixed = type("Mixed", mixins, {}).__mro__[1:-1]

    class InFront(type(kind)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            return [cls, *mixed, *kind.__mro__]

    return InFront
