"""Where everything is that a call of a module may change, such that another rank finds the same there."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.side_effects.objects.code import used_by
from opensmd.modelparallel.runtime.side_effects.objects.held import Held, held
from opensmd.modelparallel.runtime.side_effects.objects.reach import Path, at, objects_in, path_to, shown
from opensmd.modelparallel.runtime.side_effects.slots import Holder, attributes_of, slots_of

__all__ = ["ReachedPlace", "Reached"]


class ReachedPlace(NamedTuple):
    """A module, file or class, or an object that is reached from there."""

    root: str  # the name of a submodule, or what is outside of modules
    is_outside: bool = False
    path: Path = ()


class Reached:
    """What a call of a module may change: its submodules, and what they and their code use.

    Args:
        owner: the module.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._roots: dict[ReachedPlace, Holder] = {
            ReachedPlace(name): module for name, module in owner.named_modules()
        }
        kinds = tuple(dict.fromkeys(type(module) for module in owner.modules()))
        self._roots.update(_outside(kinds))

    def all(self) -> Iterator[tuple[ReachedPlace, Holder]]:
        """Yield everything, with its place."""
        seen: set[int] = set()
        for place, root in self._roots.items():
            yield place, root
            for slot, value in slots_of(root):
                for steps, each in objects_in(value, seen):
                    yield place._replace(path=(slot.name, *steps)), held(each)

    def find(self, value: Any) -> str | None:
        """Say where a value is; None if it cannot be reached."""
        for place, root in self._roots.items():
            for slot, first in slots_of(root):
                path = path_to(value, first)
                if path is not None:
                    where = repr(shown(place.root, slot.name, *path))
                    return where if place.is_outside else f"its attribute {where}"
        return None

    def at(self, place: ReachedPlace) -> Holder:
        """Return what is at a place.

        Raises:
            SMPError: there is nothing on this rank.
        """
        name, *steps = place.path or ("",)
        try:
            root = self._roots[place._replace(path=())]
            if not place.path:
                return root
            return held(at(tuple(steps), attributes_of(root)[name]))
        except (LookupError, AttributeError, TypeError):
            raise SMPError(
                "a module of another pipeline rank has changed the object "
                f"{shown(place.root, *place.path)!r}, which is "
                "not there on this rank: create it before the first step, or in each forward"
            ) from None


@functools.lru_cache(maxsize=1024)
def _outside(kinds: tuple[type, ...]) -> dict[ReachedPlace, Held]:
    """Return what is outside of modules; of several with one name, all ranks have the same number."""
    found: dict[ReachedPlace, Held] = {}
    numbers: Counter[str] = Counter()
    for each in used_by(kinds).held():
        numbers[each.path] += 1
        number = numbers[each.path]
        root = each.path if number == 1 else f"{each.path} ({number})"
        found[ReachedPlace(root, is_outside=True)] = each
    return found
