"""The objects of a model that its forwards may fill and reset, each once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from opensmd.modelparallel.runtime.side_effects.objects.code import used_by
from opensmd.modelparallel.runtime.side_effects.objects.held import Held, held
from opensmd.modelparallel.runtime.side_effects.objects.reach import Path, objects_in, shown
from opensmd.modelparallel.runtime.side_effects.slots import slots_of

__all__ = ["Objects"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Objects:
    """Objects, closures of hooks and globals that a model's modules reach.

    Args:
        modules: the model's, with their names.
        split: those of them that run piece by piece.
    """

    def __init__(self, modules: dict[nn.Module, str], split: Collection[nn.Module]) -> None:
        self._modules, self._split = modules, split
        self._known: dict[int, Held] = {}
        kinds: set[Any] = {type(module) for module in modules}
        self._outside: list[Held] = [*used_by(kinds).held()]
        for each in self._outside:
            each.is_split = True
        self.refresh()

    def __iter__(self) -> Iterator[Held]:
        yield from self._outside
        yield from self._known.values()

    def refresh(self) -> list[Held]:
        """Look for new objects, and return these."""
        self.forget_gone()
        before = set(self._known)
        walk = _Walk()
        for module, name in self._modules.items():
            for place, value in _values(module):
                self._add(walk, value, f"{name}.{place}".lstrip("."), module)
        for each in self._outside:
            for place, value in each.values.items():
                self._add(walk, value, f"{each.path}.{place}", None)
        return [each for number, each in self._known.items() if number not in before]

    def forget_gone(self) -> None:
        """Forget objects that are no more."""
        for number in [number for number, each in self._known.items() if each.is_gone]:
            del self._known[number]

    def _add(self, walk: _Walk, value: Any, path: str, module: nn.Module | None) -> None:
        for steps, each in walk.objects_in(value):
            if id(each) not in self._known:
                self._known[id(each)] = held(each, shown(path, *steps))
            if module is None or module in self._split or walk.has_another(each, module):
                self._known[id(each)].is_split = True


class _Walk:
    """One search through all modules, which mostly have the same few objects (a configuration)."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Path, Any]]] = {}
        self._first: dict[int, nn.Module] = {}

    def objects_in(self, value: Any) -> list[tuple[Path, Any]]:
        """Return the objects in a value, with the paths to them."""
        if id(value) not in self._found:
            self._found[id(value)] = objects_in(value)
        return self._found[id(value)]

    def has_another(self, each: Any, module: nn.Module) -> bool:
        """Whether a module before this one has reached an object."""
        return self._first.setdefault(id(each), module) is not module


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes, and its hooks."""
    for slot, value in slots_of(module):
        yield slot.name, value
    for hooks in _HOOKS:
        for function in getattr(module, hooks).values():
            yield hooks, function
