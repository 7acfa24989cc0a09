"""A thread's function modes are set aside and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from opensmd.modelparallel.function_modes import _torch_internals as modes

pytestmark = pytest.mark.newest


class Counting(TorchFunctionMode):
    """Counts what it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_is_set_aside_and_put_back() -> None:
    with Counting() as mode:
        torch.ones(1) + 1
        seen = mode.count
        with modes.WithoutMode(mode):
            torch.ones(1) + 1
        assert mode.count == seen
        torch.ones(1) + 1
        assert mode.count > seen
        assert modes.function_modes()[-1] is mode


def test_a_mode_below_others_is_set_aside_and_they_stay() -> None:
    with Counting() as below, Counting() as middle, Counting() as top:
        seen = below.count, top.count
        with modes.WithoutMode(below):
            torch.ones(1) + 1
            assert modes.function_modes() == [middle, top]
        assert below.count == seen[0] and top.count > seen[1]
        assert modes.function_modes() == [below, middle, top]
        with modes.WithoutMode(Counting()):
            assert modes.function_modes() == [below, middle, top]
