"""Neighbours in a split ``nn.Sequential`` that live on one rank, called as one.

Every intercepted call costs tens of microseconds, also where the module does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.runtime.interception import redirected

__all__ = ["sequence_forward"]


def sequence_forward(
    name: str, module: nn.Module, homes: Mapping[nn.Module, int], *, alone: bool
) -> Callable[[Any], Any] | None:
    """A forward for ``module`` with as few intercepted calls as there can be; None to leave it alone.

    Args:
        name: of the module.
        module: a split module.
        homes: the ranks of modules that run as a whole.
        alone: as for ``intercepted``.
    """
    if type(module) is not nn.Sequential or "forward" in module.__dict__:
        return None
    parts: list[Callable[[Any], Any]] = []
    group: list[nn.Module] = []
    children = list(module._modules.items())
    for number, (own, child) in enumerate(children):
        assert child is not None
        if not _can_join(child, homes):
            parts.append(child)
            continue
        group.append(child)
        after = children[number + 1][1] if number + 1 < len(children) else None
        if after is None or not _can_join(after, homes) or homes[after] != homes[child]:
            parts.append(_joined(f"{name}.{own}".lstrip("."), group, homes[child], alone))
            group = []
    if len(parts) == len(children):
        return None

    def forward(input: Any) -> Any:
        for part in parts:
            input = part(input)
        return input

    return forward


def _can_join(module: nn.Module, homes: Mapping[nn.Module, int]) -> bool:
    """Whether nobody outside watches the module's calls, and it runs as a whole."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return module in homes and not watched and not module._backward_pre_hooks


def _joined(last: str, group: list[nn.Module], home: int, alone: bool) -> Callable[[Any], Any]:
    if len(group) == 1:
        return group[0]
    whole = nn.Sequential(*group)
    whole.training = group[0].training
    return redirected(f"{last} and {len(group) - 1} before it", whole, home, whole.forward, alone)
