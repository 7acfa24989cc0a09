"""Telling TorchScript about replacements: it knows torch's functions by identity, and would compile others.

Importing ``torch.distributed.optim``, which has ``ZeroRedundancyOptimizer``, compiles some of them.
"""

from __future__ import annotations

from typing import Any

from torch.jit import _builtins

__all__ = ["forget_scripted", "script_as"]

_known: list[Any] = []  # kept alive, so that nothing else gets their id


def script_as(original: Any, replacement: Any) -> None:
    """Script calls of ``replacement`` like calls of ``original``, if that is torch's own."""
    operator = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator is not None and _builtins._find_builtin(replacement) is None:  # type: ignore[no-untyped-call]
        _builtins._register_builtin(replacement, operator)
        _known.append(replacement)


def forget_scripted() -> None:
    """Undo every :func:`script_as`."""
    while _known:
        del _builtins._get_builtin_table()[id(_known.pop())]  # type: ignore[no-untyped-call]
