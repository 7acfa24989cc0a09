"""Calling neighbours in a split ``nn.Sequential`` as one if they live on one rank.

Every intercepted call costs tens of microseconds, even where the module does not run. So consecutive calls on
other ranks are passed at once as soon as they are known (:mod:`.elsewhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from opensmd.modelparallel._torch_internals import has_global_hooks
from opensmd.modelparallel.runtime.calls.elsewhere import ModuleCall
from opensmd.modelparallel.runtime.calls.interception import module_call, pass_modules, redirected

__all__ = ["Sequences"]

Forward = Callable[[Any], Any]


class _SequencePart(NamedTuple):
    """What a Sequential calls: a child, or several as one; ``call`` is set if it runs as a whole."""

    forward: Forward
    call: ModuleCall | None = None


class Sequences:
    """The split Sequentials of a model.

    Args:
        split: split modules of any class, by name.
        homes: the ranks of modules that run as a whole.
        rank: this rank.
    """

    def __init__(self, split: Mapping[str, nn.Module], homes: Mapping[nn.Module, int], rank: int) -> None:
        self._rank = rank
        self._split = {name: module for name, module in split.items() if type(module) is nn.Sequential}
        self._homes = homes
        self._joined: dict[tuple[nn.Module, ...], nn.Sequential] = {}
        self._made: dict[nn.Module, tuple[tuple[object, ...], Forward | None]] = {}  # by state

    def forwards(self, *, alone: bool) -> dict[nn.Module, Forward]:
        """Return forwards with as few intercepted calls as possible, for one step.

        Modules without a benefit are left out. ``alone`` is that of ``intercepted``.
        """
        forwards: dict[nn.Module, Forward] = {}
        for name, module in self._split.items():
            state = self._state_of(module, alone)
            known = self._made.get(module)
            if known is None or known[0] != state:
                known = self._made[module] = state, self._forward(name, module, alone)
            if known[1] is not None:
                forwards[module] = known[1]
        return forwards

    def _state_of(self, module: nn.Module, alone: bool) -> tuple[object, ...]:
        """Return all that a forward depends on, which rarely changes between steps."""
        children = [(own, child, child.training, self._can_join(child)) for own, child in _children(module)]
        return alone, "forward" in module.__dict__, has_global_hooks(), children

    def _forward(self, name: str, module: nn.Module, alone: bool) -> Forward | None:
        if "forward" in module.__dict__:  # it was replaced, and the replacement must be called
            return None
        parts = self._parts(name, module, alone)
        # A single microbatch may switch modules to another mode in between.
        passes = {} if alone else self._passes(parts)
        # Nothing can be joined or passed, so a replacement would only cost.
        if len(parts) == len(_children(module)) and not passes:
            return None
        return _one_after_another(parts, passes)

    def _parts(self, name: str, module: nn.Module, alone: bool) -> list[_SequencePart]:
        """Return the children, with consecutive ones merged if they can be one call."""
        parts: list[_SequencePart] = []
        group: list[nn.Module] = []
        children = _children(module)
        for (own, child), (_, after) in zip(children, [*children[1:], ("", None)], strict=True):
            if not self._can_join(child):
                parts.append(_SequencePart(child))
                continue
            group.append(child)
            # A group ends where the next child lives elsewhere or must be called separately.
            if after is None or not self._can_join(after) or self._homes[after] != self._homes[child]:
                parts.append(self._one(f"{name}.{own}".lstrip("."), tuple(group), alone))
                group = []
        return parts

    def _passes(self, parts: Sequence[_SequencePart]) -> dict[int, tuple[ModuleCall, ...]]:
        """Find calls on other ranks, and for each the consecutive ones that follow."""
        passes: dict[int, tuple[ModuleCall, ...]] = {}
        if has_global_hooks():  # something watches the calls of all modules
            return passes
        calls: tuple[ModuleCall, ...] = ()
        for place in reversed(range(len(parts))):
            call = parts[place].call
            calls = () if call is None or call.home == self._rank else (call, *calls)
            if calls:
                passes[place] = calls
        return passes

    def _can_join(self, module: nn.Module) -> bool:
        """Whether the module runs as a whole and nothing outside watches its calls."""
        watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return module in self._homes and not watched and not module._backward_pre_hooks

    def _one(self, last: str, group: tuple[nn.Module, ...], alone: bool) -> _SequencePart:
        home = self._homes[group[0]]
        if len(group) == 1:
            return _SequencePart(group[0], module_call(last, group[0], home))
        if group not in self._joined:
            self._joined[group] = nn.Sequential(*group)
        whole = self._joined[group]
        # Keys depend on the mode of the called module; the children keep their own.
        whole.training = group[0].training
        name = f"{last} and {len(group) - 1} before it"
        return _SequencePart(
            redirected(name, whole, home, whole.forward, alone), module_call(name, whole, home)
        )


def _one_after_another(
    parts: Sequence[_SequencePart], passes: Mapping[int, tuple[ModuleCall, ...]]
) -> Forward:
    """Return a forward that calls ``parts``, and passes those of other ranks at once where it can."""

    def forward(input: Any) -> Any:
        place = 0
        while place < len(parts):
            calls = passes.get(place)
            passed = None if calls is None else pass_modules(calls, input)
            if calls is None or passed is None:
                input = parts[place].forward(input)
                place += 1
            else:
                input = passed
                place += len(calls)
        return input

    return forward


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(own, child) for own, child in module._modules.items() if child is not None]
