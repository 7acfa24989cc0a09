"""Temporarily replacing functions and attributes of torch where it has no public way.

- Functions of autograd, activation checkpoints and TorchScript functions do not pass through function modes.
  They are replaced during a step by versions that ask the microbatch of the calling thread, if any. So is the
  function with which ``functional_call`` puts other parameters into a module.
- Functions of torch.compile run uncompiled where the microbatch says so, because the compiler takes the
  thread's function mode for a part of the program.
- A module's call is redirected by an attribute on the instance, again during a step.
- ``zero_grad`` of all optimizers asks first during a step with several microbatches.
- The function that takes the norm of gradients is replaced inside torch's wrapper of it.
- A scheduler's wrapper of an optimizer's ``step`` is replaced by one that follows the optimizer's class.

tests/unit/modelparallel/redirection/test_torch_internals.py fails when torch changes any of these.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn.utils import clip_grad, stateless
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = [
    "before_optimizer_steps",
    "compiled_where",
    "follow_class",
    "let_optimizers_ask",
    "other_parameters_through",
    "replaced_backward",
    "replaced_calls",
    "replaced_functions",
    "replaced_total_norm",
]

Function = Callable[..., Any]
# torch 2.14 has split the first off the second, which remains for outside callers and calls the first.
_CHECKPOINT_GENERATOR = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(torch_checkpoint, name)
)


def replaced_functions(
    *,
    apply: Callable[[Function, type, tuple[Any, ...], dict[str, Any]], Any],
    script: Callable[[Function, Any, tuple[Any, ...], dict[str, Any]], Any],
    checkpoint: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Route three functions of torch through the given ones inside the context.

    Args:
        apply: for ``autograd.Function.apply``: (the original, the function class, args, kwargs).
        script: for calls of ``torch.jit.script`` functions: (the original, the function, args, kwargs).
        checkpoint: for the generator behind non-reentrant checkpoints: (the original, args, kwargs).
    """
    plain_apply = torch.autograd.Function.__dict__["apply"]
    plain_script = torch.jit.ScriptFunction.__call__
    plain_checkpoint: Function = getattr(torch_checkpoint, _CHECKPOINT_GENERATOR)

    def any_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # a class method in Python until torch 2.13, in C since 2.14
        return apply(plain_apply.__get__(None, cls), cls, args, kwargs)

    def any_script(self: Any, *args: Any, **kwargs: Any) -> Any:
        def original(*args: Any, **kwargs: Any) -> Any:
            return plain_script(self, *args, **kwargs)

        return script(original, self, args, kwargs)

    def any_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain_checkpoint, args, kwargs)

    return _Replaced(
        [
            (torch.autograd.Function, "apply", classmethod(any_apply), plain_apply),
            (torch.jit.ScriptFunction, "__call__", any_script, plain_script),
            (torch_checkpoint, _CHECKPOINT_GENERATOR, any_checkpoint, plain_checkpoint),
        ]
    )


def other_parameters_through(
    instead: Callable[[Function, tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[None]],
) -> contextlib.AbstractContextManager[None]:
    """Enter ``instead(original, args, kwargs)`` where ``functional_call`` puts tensors into a module."""
    plain = stateless._reparametrize_module

    def any_parameters(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return instead(plain, args, kwargs)

    return _Replaced([(stateless, "_reparametrize_module", any_parameters, plain)])


def compiled_where(wanted: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """Run functions of torch.compile uncompiled inside the context, unless ``wanted()``."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:  # nothing has been compiled, and importing the compiler takes seconds
        return contextlib.nullcontext()
    plain = compiler._stance
    return _Replaced([(compiler, "_stance", _Stance(plain, wanted), plain)])


def replaced_calls(
    forwards: dict[nn.Module, Function], calls: dict[nn.Module, Function]
) -> contextlib.AbstractContextManager[None]:
    """Temporarily replace modules' ``forward``, or their whole call including hooks.

    Args:
        forwards: what runs inside the modules' forward hooks.
        calls: what runs instead of the modules' ``__call__``.
    """
    instead = [(module, "forward", function) for module, function in forwards.items()]
    instead += [(module, "_compiled_call_impl", function) for module, function in calls.items()]
    return _Replaced(
        [(own := module.__dict__, name, function, own.get(name)) for module, name, function in instead]
    )


def replaced_backward(
    instead: Callable[[Function, tuple[Any, ...], dict[str, Any]], None],
) -> contextlib.AbstractContextManager[None]:
    """Call ``instead(original, args, kwargs)`` for ``torch.autograd.backward`` and ``Tensor.backward``."""
    plain_backward = torch.autograd.backward

    def any_backward(*args: Any, **kwargs: Any) -> None:
        instead(plain_backward, args, kwargs)

    return _Replaced([(torch.autograd, "backward", any_backward, plain_backward)])


def before_optimizer_steps(check: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Call ``check(optimizer)`` before any optimizer's ``step`` from now on.

    Returns:
        A function that undoes this.
    """
    return register_optimizer_step_pre_hook(lambda optimizer, *_: check(optimizer)).remove


def let_optimizers_ask(check: Callable[[torch.optim.Optimizer, str], None]) -> Callable[[], None]:
    """Call ``check(optimizer, name)`` before any optimizer's ``step`` or ``zero_grad`` from now on.

    torch has hooks for the first (subclasses write their own ``step``) and none for the second.

    Returns:
        A function that undoes this.
    """
    plain_zero_grad = torch.optim.Optimizer.zero_grad

    @functools.wraps(plain_zero_grad)  # scripts inspect its arguments
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        check(self, "optimizer.zero_grad")
        plain_zero_grad(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    no_more_steps = before_optimizer_steps(lambda optimizer: check(optimizer, "optimizer.step"))

    def end() -> None:
        no_more_steps()
        torch.optim.Optimizer.zero_grad = plain_zero_grad  # type: ignore[method-assign]

    return end


def follow_class(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.step`` that of the object's new class, even if a scheduler wraps it.

    A learning-rate scheduler puts a wrapper of the current ``step`` into the object.

    Raises:
        ValueError: something else has put a ``step`` into the object, which cannot be replaced.
    """
    own = optimizer.__dict__.get("step")
    if own is None:
        return
    if not hasattr(own, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"smp.DistributedOptimizer: the step of this {type(optimizer).__name__} was replaced by "
            f"{own!r:.80}, which goes past the partitions. Call smp.DistributedOptimizer first, then replace "
            "its step"
        )
    reference = weakref.ref(optimizer)  # weak, as in torch's wrapper: the object would refer to itself

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        itself: Any = reference()
        itself._opt_called = True
        return type(itself).step(itself, *args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def replaced_total_norm(instead: Callable[..., Tensor]) -> Callable[[], None]:
    """Make ``torch.nn.utils.get_total_norm`` compute ``instead(original, gradients, order, ...)``.

    ``clip_grad_norm_`` calls it, too. Scripts import it by name, so what it wraps is replaced.

    Returns:
        A function that restores torch's own.
    """
    wrapper: Any = clip_grad._get_total_norm
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    plain = cell.cell_contents
    cell.cell_contents = functools.partial(instead, plain)

    def restore() -> None:
        cell.cell_contents = plain

    return restore


class _Replaced:
    """Temporarily replaced attributes; a class, because every step needs three, and generators are slower.

    Args:
        attributes: the owner (its dict for an nn.Module), the name, the replacement, and the original; None
            if there was none.
    """

    __slots__ = ("_attributes",)

    def __init__(self, attributes: Sequence[tuple[Any, str, Any, Any]]) -> None:
        self._attributes = attributes

    def __enter__(self) -> None:
        for where, name, instead, _ in self._attributes:
            _put(where, name, instead)

    def __exit__(self, *_: object) -> None:
        for where, name, _, plain in self._attributes:
            _put(where, name, plain)


def _put(where: Any, name: str, value: Any) -> None:
    if not isinstance(where, dict):
        setattr(where, name, value)
    elif value is None:
        where.pop(name, None)
    else:
        where[name] = value


class _Stance:
    """The stance of ``torch.compiler.set_stance``, or not to compile."""

    def __init__(self, plain: Any, wanted: Callable[[], bool]) -> None:
        self._plain, self._wanted = plain, wanted

    @property
    def stance(self) -> str:
        return str(self._plain.stance) if self._wanted() else "force_eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
