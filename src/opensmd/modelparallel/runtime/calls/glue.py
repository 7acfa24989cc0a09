"""Glue: the operations between modules that run as a whole, each intercepted.

On replicated tensors, an operation runs on every rank. If tensors have homes, it follows the data to the
highest of these, so that a chain flows one way and the loss is computed on the last stage. Without gradients,
indexing stays with the indexed tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from opensmd.modelparallel._torch_internals import in_transform, out_of_transforms
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
from opensmd.modelparallel.runtime.calls.operations import (
    COMPARISONS,
    DEPENDS_ON_DATA,
    RANDOM,
    READS_VALUE,
    SELECTS,
    in_fixed_order,
    indexes_by_mask,
)
from opensmd.modelparallel.runtime.side_effects.written import STATISTICS, written_by_function
from opensmd.modelparallel.runtime.tensors.answers import WITHOUT_DATA
from opensmd.modelparallel.runtime.tensors.functions import getter, setter
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.runtime.tensors.tags import Tag, highest_home, real_tensor, tag_of

__all__ = ["Glue"]

Function = Callable[..., Any]


class Glue(TorchFunctionMode):
    """Intercepts the operations of one microbatch.

    Args:
        run: runs its calls.
    """

    def __init__(self, run: CallRunner) -> None:
        super().__init__()
        self._run = run
        self._microbatch = run.microbatch

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        run = self._run
        # The mode is still on if another is above it, because it cannot be taken off the stack then.
        if self._microbatch.inside:
            return func(*args, **kwargs)
        leaves, tags = run.leaves_of(args, kwargs)
        home = highest_home(tags)
        if home is None:
            # Whatever runs now might read a gradient, or write into what the deferred backward has saved.
            run.settle()
            if func == _GRADIENT and self._microbatch.gradients.is_shared(args[0]):
                return run.shared_gradient(args[0])
            for written in written_by_function(func, args, kwargs):
                if run.context.is_replicated(written):
                    run.wait_for_earlier()
                    run.context.buffers.written(out_of_transforms(written))
            if func in RANDOM:
                if kwargs.get("generator") is not None:
                    # It may outlive the microbatch, and passes what this one leaves to the next.
                    run.wait_for_earlier()
                return run.replicated_random(Call("", func, func, args, kwargs, leaves, tags))
            return func(*args, **kwargs)
        if func in WITHOUT_DATA:
            return func(*args, **kwargs)
        if in_transform():
            raise SMPUnsupportedError(
                f"{_name(func)} was called between modules of several partitions, on a tensor whose data is "
                "on one pipeline rank, inside torch.vmap, torch.func.grad or another transform. Put that "
                "code into an nn.Module of its own, which runs as a whole where its data is"
            )
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        if func in COMPARISONS and len(leaves) == 2:
            func, args = in_fixed_order(func, args)
            leaves, tags = run.leaves_of(args, kwargs)
        return self._intercept(Call(_name(func), func, func, args, kwargs, leaves, tags), home)

    def _intercept(self, call: Call, home: int) -> Any:
        run, func, args, kwargs = self._run, call.function, call.args, call.kwargs
        if func in READS_VALUE:
            return run.value(call, home)
        call.written = written_by_function(func, args, kwargs)
        if call.written:
            destination = highest_home(map(tag_of, call.written))
            if destination is not None:
                home = destination
            # Statistics that all ranks have are not a destination: the operation stays with its input, and
            # what it writes there travels.
            elif func not in STATISTICS and any(map(run.context.is_replicated, call.written)):
                return run.run_everywhere(call)
        if func in SELECTS and not torch.is_grad_enabled():
            selected = call.tags[0]
            home = home if selected is None else selected.home
        call.depends_on_data = func in DEPENDS_ON_DATA or indexes_by_mask(func, call.leaves)
        return run.run_at(home, call)

    def _requires_grad(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return _tag_of_first(args).requires_grad

    def _set_requires_grad(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set it on all ranks, because each has its own parameter object."""
        tensor, tag = args[0], _tag_of_first(args)
        if not isinstance(tensor, nn.Parameter):
            return self._intercept(Call(_name(func), func, func, args, kwargs, [tensor], [tag]), tag.home)
        requires_grad = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        if requires_grad != tag.requires_grad:
            # Backwards that were already requested belong to what was trained until now.
            self._run.settle()
            self._run.backward_pass.complete_gradients(self._microbatch)
            self._run.context.trained.change(tensor, tag, requires_grad)
        return tensor

    def _is_leaf(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return isinstance(args[0], nn.Parameter) or not self._requires_grad(func, args, kwargs)

    def _grad_fn(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not isinstance(tensor, Placeholder):
            return tensor.grad_fn
        return None if self._is_leaf(func, args, kwargs) else _RemoteNode()

    def _backward(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def backward(tensor: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
            self._run.backward_pass.begin(self._microbatch, tensor, gradient, *args, **kwargs)

        backward(*args, **kwargs)

    def _grad(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Part of the gradient may be pending, and the script would see only the rest.
        self._run.settle()
        self._run.backward_pass.complete_gradients(self._microbatch)
        return self._of_first(func, args, lasting=True)

    def _data(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a parameter's data, bypassing autograd, most likely to update it."""
        tag = _tag_of_first(args)
        if isinstance(args[0], nn.Parameter) and tag.home == self._run.rank:
            self._run.settle()
            self._run.wait_for_earlier()
        return self._of_first(func, args)

    def _iterate(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # One call, as in torch itself, instead of one per row.
        return iter(self._of_first(Tensor.unbind, (args[0], 0)))

    def _of_first(self, func: Function, args: tuple[Any, ...], *, lasting: bool = False) -> Any:
        tag = _tag_of_first(args)
        call = Call(_name(func), func, func, args, {}, [args[0]], [tag], lasting=lasting)
        return self._intercept(call, tag.home)

    def _hook(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Register a tensor's hook at its home only."""
        tag = _tag_of_first(args)
        if tag.home != self._run.rank:
            return _NoHook()
        self._run.settle()
        return func(real_tensor(args[0]), *args[1:], **kwargs)

    def _refuse(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise SMPUnsupportedError(
            f"{_REFUSED[func]} inside a smp.step function needs data that is on another pipeline rank. Put "
            "the code that calls it into an nn.Module, which runs as a whole on one partition"
        )


_GRADIENT = getter("grad")
_REFUSED: dict[Function, str] = {
    Tensor.__deepcopy__: "copy.deepcopy of a tensor",
    Tensor.data_ptr: "Tensor.data_ptr()",
    torch.autograd.grad: "torch.autograd.grad",
}
_Handler = Callable[[Glue, Function, tuple[Any, ...], dict[str, Any]], Any]
_SPECIAL: dict[Function, _Handler] = {
    getter("requires_grad"): Glue._requires_grad,
    Tensor.requires_grad_: Glue._set_requires_grad,
    setter("requires_grad"): Glue._set_requires_grad,
    getter("is_leaf"): Glue._is_leaf,
    getter("grad_fn"): Glue._grad_fn,
    _GRADIENT: Glue._grad,
    getter("data"): Glue._data,
    Tensor.backward: Glue._backward,
    Tensor.__iter__: Glue._iterate,
    Tensor.register_hook: Glue._hook,
    Tensor.retain_grad: Glue._hook,
    Tensor.register_post_accumulate_grad_hook: Glue._hook,
    **dict.fromkeys(_REFUSED, Glue._refuse),
}


class _RemoteNode:
    """Replaces the ``grad_fn`` of a tensor whose graph is on another rank, to show that there is one."""

    def __getattr__(self, name: str) -> Any:
        raise SMPUnsupportedError(
            f"grad_fn.{name} was asked of a tensor whose graph is on another pipeline rank"
        )


class _NoHook:
    """The handle of a hook that is registered on another rank."""

    def remove(self) -> None:
        """Do nothing: nothing is registered here."""


def _tag_of_first(args: tuple[Any, ...]) -> Tag:
    """Return the tag of the tensor whose method or attribute was called; it always has one here."""
    tag = tag_of(args[0])
    assert tag is not None
    return tag


@functools.cache
def _name(func: Function) -> str:
    return str(resolve_name(func) or getattr(func, "__qualname__", repr(func)))
