"""Forward hooks inside modules that run as a whole on one rank: the other ranks do not run them.

What hooks carried out in the dry run is known (:mod:`.escapes`), and the modules around them were opened.
What they begin to carry out later is noticed here where it shows: in what the step function returns.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.plan import Plan, ancestors
from opensmd.modelparallel.runtime import structure
from opensmd.modelparallel.runtime.tags import tag_of
from opensmd.modelparallel.storages import StorageReference

__all__ = ["InnerHooks"]

Function = Callable[..., Any]
Seen = dict[int, tuple[StorageReference, nn.Module]]

WAY_OUT = (
    "Let it do so from the first step on (with Hugging Face's models: output_attentions=True in the first "
    "step), with auto_partition, which then looks into the modules around it, or let these return the tensor"
)


class InnerHooks:
    """The hooks of modules that the other ranks do not look into.

    Args:
        module: the model.
        plan: where everything lives.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        whole = plan.atomic()
        self._inside = {
            each: (name, next(around for around in ancestors(name) if around in whole))
            for name, each in module.named_modules()
            if not whole.keys().isdisjoint(ancestors(name))
        }
        self._hooks = [each._forward_hooks for each in self._inside]
        self._known = set(plan.hooked)
        self._warned = False
        self._thread = threading.local()

    @contextlib.contextmanager
    def watched(self, function: Function) -> Iterator[Function]:
        """``function`` for one step, checked if there are hooks.

        Raises:
            SMPUnsupportedError: from ``function``, if it returns a tensor that a hook carried out.

        Warns:
            UserWarning: once, of a hook that has been registered since the plan was made.
        """
        with contextlib.ExitStack() as stack:
            if any(self._hooks):
                for module in self._inside:
                    if module._forward_hooks:
                        stack.callback(module.register_forward_hook(self._see).remove)
                function = self._checked(function)
            yield function
        if any(self._hooks) and not self._warned:
            self._warn()

    def _see(self, module: nn.Module, _: Any, out: Any) -> None:
        seen: Seen = getattr(self._thread, "seen", {})  # another thread's may be a checkpoint's recomputation
        for tensor in _strided(out):
            storage = tensor.untyped_storage()
            seen[storage._cdata] = (StorageReference(storage), module)

    def _checked(self, function: Function) -> Function:
        def checked(*args: Any, **kwargs: Any) -> Any:
            seen: Seen = {}
            self._thread.seen = seen
            value = function(*args, **kwargs)
            with without_interception():
                given = {each.untyped_storage()._cdata for each in _strided((args, kwargs))}
                for tensor in _strided(value):
                    number = tensor.untyped_storage()._cdata
                    if number in seen and number not in given and not seen[number][0].expired():
                        self._refuse(seen[number][1])
            return value

        return checked

    def _refuse(self, module: nn.Module) -> None:
        name, around = self._inside[module]
        raise SMPUnsupportedError(
            f"a forward hook of module {name!r} carried a tensor out of module {around!r}, which runs on one "
            "partition as a whole, and the step function returned it: the other ranks do not have it. "
            f"{WAY_OUT}"
        )

    def _warn(self) -> None:
        for module, (name, around) in self._inside.items():
            if module._forward_hooks and name not in self._known:
                self._warned = True
                warnings.warn(
                    f"module {name!r} has got a forward hook, which runs only where module {around!r} lives: "
                    "tensors that it carries out are missing on the other ranks. Hooks that do so must be at "
                    "work in the first step, with auto_partition",
                    stacklevel=5,
                )
                return


def _strided(value: Any) -> list[Tensor]:
    """The tensors of ``value`` that have memory of their own here, without a home elsewhere."""
    found: list[Tensor] = []
    structure.collect(value, found)
    return [each for each in found if tag_of(each) is None and each.layout is torch.strided]
