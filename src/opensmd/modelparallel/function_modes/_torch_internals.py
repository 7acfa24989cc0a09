"""A thread's stacks of function modes and dispatch modes, which only private functions of torch can change.

A mode that a script has entered must not be entered again, because its object remembers the previous state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WithoutDefaultDevice", "WithoutMode", "dispatch_modes", "function_modes", "on_stack"]

# Every intercepted call goes through these.
_stack_height = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at
_pop_mode = torch._C._pop_torch_function_stack
_push_mode = torch._C._push_on_torch_function_stack


class WithoutMode:
    """Temporarily takes a function mode off this thread's stack, if it is there; those above it stay."""

    __slots__ = ("_above", "_mode", "_taken")

    def __init__(self, mode: torch.overrides.TorchFunctionMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        height = _stack_height()
        self._above: list[torch.overrides.TorchFunctionMode] = []
        self._taken = height > 0 and _mode_at(height - 1) is self._mode
        if self._taken:
            _pop_mode()
        elif any(_mode_at(place) is self._mode for place in range(height - 1)):
            # The script has entered its own modes since, which is rare.
            self._taken = True
            while (mode := _pop_mode()) is not self._mode:
                self._above.insert(0, mode)
            _push_all(self._above)

    def __exit__(self, *_: object) -> None:
        if self._taken:
            for _mode in self._above:
                _pop_mode()
            _push_mode(self._mode)
            _push_all(self._above)


class WithoutDefaultDevice:
    """Temporarily takes a default device off this thread's stack of modes, as ``loss.backward()`` does.

    torch's checkpoints enter it again when they recompute, and if it were still on, it would never come off.
    """

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        self._modes = _take_modes() if _stack_height() else []
        _push_all(mode for mode in self._modes if not isinstance(mode, DeviceContext))

    def __exit__(self, *_: object) -> None:
        if self._modes:
            _take_modes()
            _push_all(self._modes)


def _take_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Take all modes off this thread's stack and return them, outermost first."""
    return [_pop_mode() for _ in range(_stack_height())][::-1]


def _push_all(modes: Iterable[torch.overrides.TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Return the function modes of this thread, outermost first."""
    return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, outermost first."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    return _python_dispatch._get_current_dispatch_mode_stack()


@contextlib.contextmanager
def on_stack(mode: torch.overrides.TorchFunctionMode | TorchDispatchMode) -> Iterator[None]:
    """Apply another thread's modes in this one without entering them, which would change the objects."""
    dispatches = isinstance(mode, TorchDispatchMode)
    push: Callable[[Any], None] = _python_dispatch._push_mode if dispatches else _push_mode
    pop: Callable[[], Any] = _python_dispatch._pop_mode if dispatches else _pop_mode
    push(mode)
    try:
        yield
    finally:
        pop()
