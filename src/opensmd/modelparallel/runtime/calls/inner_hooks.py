"""Forward hooks inside modules that run as a whole on one rank, and so not on the other ranks.

What hooks carried out of modules in the dry run is known (``dry_run/observing``), and the modules around them
run piece by piece. What they start to carry out later is noted here, and refused where it is used
(``side_effects/escaped.py``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import watchers
from opensmd.modelparallel.compatibility.quirks import records_outputs
from opensmd.modelparallel.planning.plan import Plan, ancestors
from opensmd.modelparallel.runtime.side_effects.escaped import EscapedTensors
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import tag_of
from opensmd.script_level import script_level

__all__ = ["InnerHooks", "may_carry"]


def may_carry(module: nn.Module, plan: Plan) -> bool:
    """Whether hooks may carry something out of modules that ``plan`` runs as a whole.

    Some models register such hooks only in the forward, but announce it beforehand.
    """
    # The runtime handles hooks on the modules that run as a whole; these are deeper.
    if any(watchers(inner) for inner in _inside(module, plan)):
        return True
    modules = dict(module.named_modules(remove_duplicate=False))
    return any(records_outputs(modules[name]) for name in plan.split())


class InnerHooks:
    """The hooks of modules that other ranks cannot see into.

    Args:
        module: the model.
        plan: where everything lives.
        escaped: collects what hooks have seen.
    """

    def __init__(self, module: nn.Module, plan: Plan, escaped: EscapedTensors) -> None:
        self._inside = _inside(module, plan)
        # torch fills these very dicts, so they show whether anything was registered.
        self._hooks = [inner._forward_hooks for inner in self._inside]
        self._known = set(plan.hooked)
        self._escaped = escaped
        self._warned = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the hooks during one step.

        Warns:
            UserWarning: once, about a hook that was registered after the plan was made.
        """
        hooked = [module for module in self._inside if module._forward_hooks] if any(self._hooks) else []
        # Registered last, to see the result after the modules' own hooks.
        handles = [module.register_forward_hook(self._see) for module in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if any(self._hooks) and not self._warned:
            self._warn()

    def _see(self, module: nn.Module, args: Any, out: Any) -> None:
        memory = {tensor.untyped_storage()._cdata for tensor in _strided(args)}
        name, around = self._inside[module]
        for tensor in _strided(out):
            # Arguments existed before, tagged or on all ranks; only new tensors can be missing elsewhere.
            if tensor.untyped_storage()._cdata not in memory:
                self._escaped.note(
                    tensor,
                    f"a forward hook of module {name!r} carried a tensor out of module {around!r}, which "
                    "runs on one partition as a whole, and the step function used or returned it: the other "
                    "ranks do not have it",
                )

    def _warn(self) -> None:
        for module, (name, around) in self._inside.items():
            if module._forward_hooks and name not in self._known:
                self._warned = True
                warnings.warn(
                    f"module {name!r} got a forward hook, which runs only where module {around!r} lives: "
                    "tensors that it carries out are missing on the other ranks. Hooks that do so must be "
                    "registered before the first step, and run in it",
                    stacklevel=script_level(),
                )
                return


def _inside(module: nn.Module, plan: Plan) -> dict[nn.Module, tuple[str, str]]:
    """Return the modules inside those that run as a whole, with the names of both."""
    whole = plan.atomic()
    return {
        inner: (name, next(around for around in ancestors(name) if around in whole))
        for name, inner in module.named_modules()
        if not whole.keys().isdisjoint(ancestors(name))
    }


def _strided(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` with memory here and no home elsewhere."""
    tensors = structure.tensors_in(value)
    return [tensor for tensor in tensors if tag_of(tensor) is None and tensor.layout is torch.strided]
