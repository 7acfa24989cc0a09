"""Activation checkpointing under the names of later versions, through ``torch.utils.checkpoint``.

With the setting ``offload_activations``, inputs of checkpoints leave memory until their backward is near.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from opensmd.modelparallel.dry_run.capture import is_tracing
from opensmd.modelparallel.runtime.calls.checkpointed import checkpointed
from opensmd.modelparallel.runtime.calls.interception import current_run
from opensmd.modelparallel.state import state
from opensmd.script_level import script_level

__all__ = ["checkpoint", "checkpoint_layers", "checkpoint_sequential", "set_activation_checkpointing"]


# Sequentials that run in pieces; copies of them keep that as a forward of their own.
_in_pieces: weakref.WeakSet[nn.Sequential] = weakref.WeakSet()


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True) -> Any:
    """Call ``module(*args)``, and recompute it in backward instead of keeping activations.

    Args:
        module: called with ``args``, now and again in backward.
        preserve_rng_state: give dropout the same random numbers when it is recomputed.
    """
    return _run_checkpointed(module, args, {}, preserve_rng_state)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Run a Sequential in checkpointed pieces.

    Args:
        sequential_module: its children run from first to last.
        input: what the first child gets; a tuple is one argument with ``pack_args_as_tuple``, otherwise
            several.
        strategy: "each" child, "contiguous" (all as one piece) or "group_N" (pieces of N children).
        preserve_rng_state: give dropout the same random numbers when it is recomputed.

    Raises:
        TypeError: not a Sequential.
        ValueError: an unknown strategy.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise TypeError(
            f"checkpoint_sequential: expected a torch.nn.Sequential, got {type(sequential_module).__name__}; "
            "use checkpoint for other modules"
        )
    value = input
    for piece in _pieces(list(sequential_module), strategy):
        several = isinstance(value, tuple) and not pack_args_as_tuple
        run = _run(piece, pack_args_as_tuple)
        value = _run_checkpointed(run, value if several else (value,), {}, preserve_rng_state)
    return value


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Checkpoint every later call of ``module``, anywhere in the model.

    Args:
        module: its ``forward`` is replaced; a Sequential is checkpointed in pieces. One with a ``forward`` of
            its own keeps that: each child is checkpointed, or with another strategy the whole.
        preserve_rng_state: give dropout the same random numbers when it is recomputed.
        pack_args_as_tuple, strategy: for a Sequential, as in :func:`checkpoint_sequential`.

    Raises:
        TypeError: not a module.
        ValueError: an unknown strategy.

    Warns:
        UserWarning: a ``strategy`` or ``pack_args_as_tuple`` that the module's own ``forward`` leaves without
            effect.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_activation_checkpointing: expected a torch.nn.Module, got {module!r}")
    _pieces([], strategy)
    sequential = module if isinstance(module, nn.Sequential) else None
    if sequential is not None and _calls_children_in_order(sequential):

        def run_sequential(input: Any) -> Any:
            return checkpoint_sequential(sequential, input, strategy, preserve_rng_state, pack_args_as_tuple)

        sequential.forward = run_sequential  # type: ignore[method-assign]
        _in_pieces.add(sequential)
        return
    if sequential is not None and strategy == "each":
        for child in sequential.children():
            _checkpoint_whole(child, preserve_rng_state)
        return
    if strategy.startswith("group") or (sequential is None and (pack_args_as_tuple or strategy != "each")):
        warnings.warn(
            "smp.set_activation_checkpointing: strategy and pack_args_as_tuple are for a torch.nn.Sequential "
            f"without a forward of its own; this {type(module).__name__} is checkpointed whole",
            stacklevel=script_level(),
        )
    _checkpoint_whole(module, preserve_rng_state)


def _calls_children_in_order(module: nn.Sequential) -> bool:
    """Whether neither a class nor the script has given it another ``forward``."""
    return type(module).forward is nn.Sequential.forward and (
        "forward" not in vars(module) or module in _in_pieces
    )


def _checkpoint_whole(module: nn.Module, preserve_rng_state: bool) -> None:
    plain: Callable[..., Any] = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_checkpointed(plain, args, kwargs, preserve_rng_state)

    module.forward = run


def checkpoint_layers(module: nn.Module, names: Sequence[str]) -> None:
    """Checkpoint the layers of ``module`` that the setting ``auto`` has chosen.

    Raises:
        ValueError: it has no such layer.
    """
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise ValueError(
                f"auto has chosen to checkpoint module {name!r}, which this model lacks: its factory must "
                "return the same model as the script wraps"
            )
        whole = "contiguous" if isinstance(known[name], nn.Sequential) else "each"
        set_activation_checkpointing(known[name], strategy=whole)


def _run_checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
) -> Any:
    # A module whose children are on several ranks is not checkpointed as a whole; each child is, on its rank.
    offloading = None if is_tracing() or current_run() is not None else state.offloading
    return checkpointed(function, args, kwargs, offloading=offloading, preserve_rng_state=preserve_rng_state)


def _pieces(children: Sequence[nn.Module], strategy: str) -> list[list[nn.Module]]:
    match = re.fullmatch(r"group_([1-9]\d*)", strategy)
    if strategy == "contiguous":
        size = max(1, len(children))
    elif strategy == "each" or match:
        size = int(match[1]) if match else 1
    else:
        raise ValueError(f"strategy={strategy!r}: expected 'each', 'contiguous' or 'group_N'")
    return [list(children[first : first + size]) for first in range(0, len(children), size)]


def _run(piece: Sequence[nn.Module], packed: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        value: Any = args[0] if len(args) == 1 else args
        for module in piece:
            several = isinstance(value, tuple) and not packed
            value = module(*value) if several else module(value)
        return value

    return run
