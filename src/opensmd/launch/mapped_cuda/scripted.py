"""TorchScript knows torch's own functions by their identity; what stands in their place would be compiled.

Importing ``torch.distributed.optim``, which has ``ZeroRedundancyOptimizer``, compiles some of them.
"""

from __future__ import annotations

from typing import Any

from torch.jit import _builtins

__all__ = ["forget_scripted", "script_as"]

_known: list[Any] = []  # alive, so that nothing else has their identity


def script_as(original: Any, replacement: Any) -> None:
    """Let a scripted call of ``replacement`` be what one of ``original`` is, if that is torch's own."""
    operator = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator is not None and _builtins._find_builtin(replacement) is None:  # type: ignore[no-untyped-call]
        _builtins._register_builtin(replacement, operator)
        _known.append(replacement)


def forget_scripted() -> None:
    """Undo every :func:`script_as`."""
    while _known:
        del _builtins._get_builtin_table()[id(_known.pop())]  # type: ignore[no-untyped-call]
