"""Forward hooks inside modules that run as a whole on one rank: the other ranks do not run them.

What hooks carried out in the dry run is known (``dry_run/observing``), and the modules around them are run
piece by piece. What they begin to carry out later is noted here, and refused where it is used
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

__all__ = ["InnerHooks", "may_carry"]


def may_carry(module: nn.Module, plan: Plan) -> bool:
    """Whether hooks may carry something out of modules that ``plan`` runs as a whole.

    Some models register such hooks in the forward only, and tell beforehand.
    """
    # Hooks on the modules that are run as a whole are the runtime's own business; these are deeper.
    if any(watchers(each) for each in _inside(module, plan)):
        return True
    modules = dict(module.named_modules(remove_duplicate=False))
    return any(records_outputs(modules[name]) for name in plan.split())


class InnerHooks:
    """The hooks of modules that the other ranks do not look into.

    Args:
        module: the model.
        plan: where everything lives.
        escaped: collects what hooks have seen.
    """

    def __init__(self, module: nn.Module, plan: Plan, escaped: EscapedTensors) -> None:
        self._inside = _inside(module, plan)
        # torch fills these very dicts, so one look at them tells whether anything was registered.
        self._hooks = [each._forward_hooks for each in self._inside]
        self._known = set(plan.hooked)
        self._escaped = escaped
        self._warned = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the hooks for the time of one step.

        Warns:
            UserWarning: once, of a hook that has been registered since the plan was made.
        """
        hooked = [module for module in self._inside if module._forward_hooks] if any(self._hooks) else []
        # Registered last, so that they see what the modules' own hooks have made of the result.
        handles = [module.register_forward_hook(self._see) for module in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if any(self._hooks) and not self._warned:
            self._warn()

    def _see(self, module: nn.Module, args: Any, out: Any) -> None:
        given = {each.untyped_storage()._cdata for each in _strided(args)}
        name, around = self._inside[module]
        for tensor in _strided(out):
            # What was given was there before, with a tag or on all ranks; only the new can be missing
            # elsewhere.
            if tensor.untyped_storage()._cdata not in given:
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
                    stacklevel=9,  # the call of the step function
                )
                return


def _inside(module: nn.Module, plan: Plan) -> dict[nn.Module, tuple[str, str]]:
    """The modules inside those that run as a whole, with their names and the names of these."""
    whole = plan.atomic()
    return {
        each: (name, next(around for around in ancestors(name) if around in whole))
        for name, each in module.named_modules()
        if not whole.keys().isdisjoint(ancestors(name))
    }


def _strided(value: Any) -> list[Tensor]:
    """The tensors of ``value`` that have memory of their own here, without a home elsewhere."""
    tensors = structure.tensors_in(value)
    return [each for each in tensors if tag_of(each) is None and each.layout is torch.strided]
