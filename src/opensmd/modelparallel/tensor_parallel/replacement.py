"""Replacing marked modules by distributed ones when a model is wrapped."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import nn

from opensmd.modelparallel._torch_internals import is_compiled
from opensmd.modelparallel.compatibility.quirks import reads_inner_weights
from opensmd.modelparallel.precision.half_module import to_half
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel._torch_internals import call_parts
from opensmd.modelparallel.tensor_parallel.contexts import wish_of
from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule, mark_outermost
from opensmd.modelparallel.tensor_parallel.registry import counterpart
from opensmd.modelparallel.tensor_parallel.tensor_group import batch_is_shared

__all__ = ["distribute"]

logger = logging.getLogger("opensmd.modelparallel")


def distribute(module: nn.Module) -> nn.Module:
    """Replace the outermost marked modules that have a counterpart; return the root, which may be new.

    A module whose sizes the number of ranks does not divide, or that shares a parameter with modules around
    it, stays, and its children are considered instead. With the setting ``fp16_params``, all distributed
    modules have 16 bits.

    Raises:
        ValueError: a compiled module would have to gather batches inside.
    """
    uses = _uses(module)
    replaced = _Replacement(uses).of(module, "")
    mark_outermost(replaced)
    _require_not_compiled(replaced)
    if state.cfg.fp16_params:
        for submodule in replaced.modules():
            if isinstance(submodule, DistributedModule):
                to_half(submodule, torch.float16)
    return replaced


class _Replacement:
    """One walk over a model; a module in two places is replaced by one module in both."""

    def __init__(self, uses: Counter[int]) -> None:
        self._uses = uses
        self._done: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module, name: str) -> nn.Module:
        if module in self._done:
            return self._done[module]
        if reads_inner_weights(module):
            logger.info("module %r is not distributed: it computes with the weights in it", name)
            self._done[module] = module
            return module
        self._done[module] = counterpart = self._counterpart(module, name) or module
        if counterpart is module and not isinstance(module, DistributedModule):
            for own, child in list(module.named_children()):
                replaced = self.of(child, f"{name}.{own}" if name else own)
                if replaced is not child:
                    setattr(module, own, replaced)
            if any(isinstance(submodule, DistributedModule) for submodule in module.modules()):
                call_parts(module)
        return counterpart

    def _counterpart(self, module: nn.Module, name: str) -> nn.Module | None:
        wish = wish_of(module)
        if wish is None or isinstance(module, DistributedModule):
            return None
        if self._shares(module):
            logger.info("module %r is not distributed: it shares parameters with others", name)
            return None
        try:
            return counterpart(module, wish.config)
        except ValueError as error:
            if state.rank == 0:
                logger.warning("module %r (%s) is not distributed: %s", name, type(module).__name__, error)
            return None

    def _shares(self, module: nn.Module) -> bool:
        own = _uses(module)
        return any(self._uses[parameter] > count for parameter, count in own.items())


def _require_not_compiled(module: nn.Module) -> None:
    if batch_is_shared():
        return
    for name, submodule in module.named_modules():
        if is_compiled(submodule) and any(
            isinstance(inner, DistributedModule) for inner in submodule.modules()
        ):
            raise ValueError(
                f"module {name!r} is compiled and has distributed modules inside, which gather their ranks' "
                "batches: torch.compile does not go through that. Use prescaled_batch=True, with which it "
                "does, or compile modules without distributed ones, or exempt those with "
                "smp.set_tensor_parallelism(module, enabled=False)"
            )


def _uses(module: nn.Module) -> Counter[int]:
    """Return how many names each parameter has in a module, by id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
