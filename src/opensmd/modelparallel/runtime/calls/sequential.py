"""Neighbours in a split ``nn.Sequential`` that live on one rank, called as one.

Every intercepted call costs tens of microseconds, also where the module does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.runtime.calls.interception import redirected

__all__ = ["Sequences"]

Forward = Callable[[Any], Any]


class Sequences:
    """The split Sequentials of a model.

    Args:
        split: split modules of any class, by name.
        homes: the ranks of modules that run as a whole.
    """

    def __init__(self, split: Mapping[str, nn.Module], homes: Mapping[nn.Module, int]) -> None:
        self._split = {name: each for name, each in split.items() if type(each) is nn.Sequential}
        self._homes = homes
        self._joined: dict[tuple[nn.Module, ...], nn.Sequential] = {}

    def forwards(self, *, alone: bool) -> dict[nn.Module, Forward]:
        """Forwards with as few intercepted calls as there can be, for one step.

        Modules that would have nothing of it are left out. ``alone`` is that of ``intercepted``.
        """
        found: dict[nn.Module, Forward] = {}
        for name, module in self._split.items():
            forward = self._forward(name, module, alone)
            if forward is not None:
                found[module] = forward
        return found

    def _forward(self, name: str, module: nn.Module, alone: bool) -> Forward | None:
        if "forward" in module.__dict__:  # somebody has replaced it, and expects it to be called
            return None
        parts: list[Forward] = []
        group: list[nn.Module] = []
        children = list(module._modules.items())
        for number, (own, child) in enumerate(children):
            assert child is not None
            if not self._can_join(child):
                parts.append(child)
                continue
            group.append(child)
            after = children[number + 1][1] if number + 1 < len(children) else None
            # A group ends where the next child lives elsewhere, or must be called by itself.
            if after is None or not self._can_join(after) or self._homes[after] != self._homes[child]:
                parts.append(self._one(f"{name}.{own}".lstrip("."), tuple(group), alone))
                group = []
        # Nothing could be joined, and a forward of ours would only cost.
        if len(parts) == len(children):
            return None

        def forward(input: Any) -> Any:
            for part in parts:
                input = part(input)
            return input

        return forward

    def _can_join(self, module: nn.Module) -> bool:
        """Whether nobody outside watches the module's calls, and it runs as a whole."""
        watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return module in self._homes and not watched and not module._backward_pre_hooks

    def _one(self, last: str, group: tuple[nn.Module, ...], alone: bool) -> Forward:
        if len(group) == 1:
            return group[0]
        if group not in self._joined:
            self._joined[group] = nn.Sequential(*group)
        whole = self._joined[group]
        # Keys of calls look at the mode of what is called; the children keep their own.
        whole.training = group[0].training
        return redirected(
            f"{last} and {len(group) - 1} before it", whole, self._homes[group[0]], whole.forward, alone
        )
