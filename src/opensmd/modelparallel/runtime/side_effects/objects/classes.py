"""What a class itself holds: masks, caches and collectors that all its instances share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import EnumMeta
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime.side_effects.containers import is_container
from opensmd.modelparallel.runtime.side_effects.objects.held import Held
from opensmd.modelparallel.runtime.side_effects.objects.reach import is_object

__all__ = ["HeldClassAttributes"]


class HeldClassAttributes(Held):
    """Those attributes of a class that the code of modules may set or fill.

    Args:
        kind: the class.
        stored: names that code sets in something other than ``self``.
        counted: names to which code adds, or whose old value it reads when it sets them. Numbers of these
            mostly describe the process.
    """

    def __init__(self, kind: type, stored: Collection[str], counted: Collection[str]) -> None:
        super().__init__(f"{kind.__module__}.{kind.__qualname__}")
        self._kind = kind
        self._counted = counted
        filled = (
            [] if isinstance(kind, EnumMeta) else [n for n, value in vars(kind).items() if _is_filled(value)]
        )
        self._names = tuple(sorted(name for name in {*stored, *filled} if not name.startswith("__")))

    def __bool__(self) -> bool:
        return bool(self._names)

    def describes_process(self, name: str) -> bool:
        return name in self._counted

    @property
    def values(self) -> Mapping[str, Any]:
        # Methods and properties may have the name of what code sets in other objects.
        attributes = vars(self._kind)
        return {
            name: attributes[name]
            for name in self._names
            if name in attributes and not hasattr(type(attributes[name]), "__get__")
        }

    def put(self, name: str, value: Any) -> None:
        type.__setattr__(self._kind, name, value)

    def remove(self, name: str) -> None:
        if name in vars(self._kind):
            type.__delattr__(self._kind, name)


def _is_filled(value: Any) -> bool:
    return isinstance(value, Tensor) or is_container(value) or is_object(value)
