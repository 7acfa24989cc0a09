"""Activation checkpoints, which keep only their inputs, in memory or offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.descriptions.description import Description
from opensmd.modelparallel.runtime.side_effects.repeated import repeatable
from opensmd.modelparallel.runtime.tensors import structure

__all__ = ["can_be_repeated", "checkpointed"]


def checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    offloading: Offloading | None,
    preserve_rng_state: bool = True,
) -> Any:
    """Call the function, and again in backward instead of keeping its intermediate results.

    Both calls see the same contents of caches and containers among the arguments.

    Args:
        offloading: where to keep its inputs; None keeps them in memory.
        preserve_rng_state: draw the same random numbers again.
    """
    if torch.is_grad_enabled():
        function = repeatable(function)
    if offloading is None or not torch.is_grad_enabled():
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
    # A checkpoint saves tensors among its positional arguments; those inside containers it would just hold.
    tensors = structure.tensors_in((args, kwargs))
    # A repeated one (an attention's query, key and value) is also one tensor in the second call.
    distinct = {id(tensor): tensor for tensor in tensors}
    order = {key: number for number, key in enumerate(distinct)}
    places = [order[id(tensor)] for tensor in tensors]
    nothing = torch.empty(0, device="cpu")
    frame = structure.substitute((args, kwargs), iter([nothing] * len(tensors)))

    def call(*values: Tensor) -> Any:
        args, kwargs = structure.substitute(frame, iter([values[place] for place in places]))
        return function(*args, **kwargs)

    inputs = list(distinct.values())
    with offloading.of_inputs(inputs):
        return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def can_be_repeated(call: Call, known: Description | None) -> bool:
    """Whether it may run twice, because it does not change its arguments in place."""
    return not (_begins_in_place(call.owner) if known is None else known.changed)


def _begins_in_place(owner: nn.Module | None) -> bool:
    """Whether a module, or the first one inside it, declares that it works in place, as activations do."""
    if not isinstance(owner, nn.Module):
        return False
    leaves = (module for module in owner.modules() if next(module.children(), None) is None)
    return bool(getattr(next(leaves), "inplace", False))
