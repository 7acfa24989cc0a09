"""What code uses outside of modules is found, and nothing of what it sets in the module itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.objects.code import used_by

SEEN: list[Tensor] = []


class Space:
    mask: Tensor | None = None
    names = ("a", "b")
    calls, most, scale = 0, 0, 1.0


def counter() -> Any:
    calls: list[int] = []
    return lambda self, x: calls.append(len(x))


class User(nn.Module):
    cache: ClassVar[dict[int, Tensor]] = {}
    width = 3
    count = counter()

    def __init__(self) -> None:
        super().__init__()
        self.width = 4

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        Space.mask, Space.scale = x > 0, float(len(x))
        Space.calls += 1
        Space.most = max(Space.most, len(x))
        setattr(type(self), "late", 1)  # noqa: B010  # as code does whose names are arguments
        return x


def test_globals_classes_and_closures_that_code_uses_are_found() -> None:
    held = {each.path.removeprefix(f"{__name__}."): each for each in used_by([User]).held()}
    assert {name: set(each.values) for name, each in held.items()} == {
        __name__: {"SEEN"},
        "counter.<locals>.<lambda>": {"calls"},
        "User": {"cache"},
        "Space": {"mask", "calls", "most", "scale"},
    }
    counts = {name for name in ("calls", "most", "scale") if held["Space"].describes_process(name)}
    assert counts == {"calls", "most"}
    user = held["User"]
    user.put("late", 2)
    assert user.values["late"] == vars(User)["late"] == 2
    user.remove("late")
    assert not hasattr(User, "late") and User.width == 3
