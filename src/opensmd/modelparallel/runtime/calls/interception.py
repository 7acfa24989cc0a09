"""Intercepting modules that run as a whole on one rank, and functions of torch that function modes miss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel import _torch_internals as internals
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.function_modes._torch_internals import WithoutMode
from opensmd.modelparallel.redirection import _torch_internals as redirection
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
from opensmd.modelparallel.runtime.calls.elsewhere import ModuleCall, passed
from opensmd.modelparallel.runtime.calls.iterators import has_iterators, without_iterators
from opensmd.modelparallel.runtime.side_effects.escaped_from_checkpoints import EscapedFromCheckpoint
from opensmd.modelparallel.runtime.side_effects.parameters import with_other_parameters
from opensmd.modelparallel.runtime.tensors.tags import highest_home

__all__ = [
    "CallingThread",
    "beside_the_program",
    "current_run",
    "intercepted",
    "module_call",
    "pass_modules",
    "redirected",
    "set_run",
]

Function = Callable[..., Any]


class _RunOfThread(threading.local):
    run: CallRunner | None = None


_thread = _RunOfThread()


def current_run() -> CallRunner | None:
    """Return the calling thread's microbatch; None outside steps and inside modules that run as a whole."""
    run = _thread.run
    return None if run is None or run.microbatch.inside else run


def set_run(run: CallRunner | None) -> None:
    """Set the microbatch that this thread runs from now on, or None."""
    _thread.run = run


class CallingThread:
    """The calling thread, for files in lower layers, which cannot import this one."""

    @property
    def run(self) -> CallRunner | None:
        """Return :func:`current_run`."""
        return current_run()


@contextlib.contextmanager
def beside_the_program() -> Iterator[bool]:
    """Let a step function do something that concerns only this rank, with complete gradients.

    Yields whether the thread is running a microbatch.
    """
    run = current_run()
    if run is None:
        yield False
        return
    run.settle()
    run.backward_pass.complete_gradients(run.microbatch)
    with run.microbatch.not_intercepted():
        yield True


@contextlib.contextmanager
def intercepted(
    modules: Mapping[str, tuple[nn.Module, int]],
    others: Mapping[nn.Module, Function],
    *,
    alone: bool,
) -> Iterator[None]:
    """Redirect the calls of modules that run as a whole, during a step.

    Args:
        modules: by name, with the rank that runs each.
        others: further modules, with their replaced forwards.
        alone: whether there is one microbatch, so no other sees what it does to the modules.
    """
    forwards: dict[nn.Module, Function] = dict(others)
    calls: dict[nn.Module, Function] = {}
    for name, (module, home) in modules.items():
        # The forward rather than the call, so that the module's hooks run on every rank, around it.
        forwards[module] = redirected(name, module, home, module.forward, alone)
        # A weight that a hook computes must still be the same when the forward has its input.
        makes_weight = not alone and internals.makes_weight(module)
        if makes_weight or "_compiled_call_impl" in module.__dict__ or internals.has_backward_hooks(module):
            calls[module] = redirected(name, module, home, internals.whole_call(module), alone)

    def any_backward(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = current_run()
        if run is None:
            original(*args, **kwargs)
        else:
            run.backward_pass.begin(run.microbatch, *args, **kwargs)

    with (
        redirection.replaced_calls(forwards, calls),
        redirection.replaced_functions(apply=_apply, script=_script, checkpoint=_checkpoint),
        redirection.other_parameters_through(_other_parameters),
        redirection.compiled_where(lambda: current_run() is None),
        redirection.replaced_backward(any_backward),
    ):
        yield


def module_call(name: str, module: nn.Module, home: int) -> ModuleCall:
    """Return the call of a module on rank ``home`` in its current mode."""
    shown = f"module {name!r}" if name else "the model"
    return ModuleCall(home, shown, ("module", name, module.training))


def pass_modules(calls: Sequence[ModuleCall], argument: Any) -> Tensor | None:
    """Return the placeholder for the result of modules on other ranks; None if they must be called."""
    run = current_run()
    if run is None or run.microbatch.functional:
        return None
    with WithoutMode(run.microbatch.mode):
        return passed(run, calls, argument)


def redirected(name: str, module: nn.Module, home: int, function: Function, alone: bool) -> Function:
    """Return ``function``, the call of ``module``, redirected to run as a whole on rank ``home``."""
    training = module.training
    usual = module_call(name, module, home)
    shown = usual.name

    def call(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None:
            return function(*args, **kwargs)
        own = usual
        if module.training != training:
            if not alone:
                raise SMPUnsupportedError(
                    f"{shown} was switched with train() or eval() inside a smp.step function. The "
                    "microbatches of a step share its modules and take turns: switch between steps"
                )
            own = module_call(name, module, home)
        called = function
        if has_iterators(args, kwargs):
            called, (args, kwargs) = without_iterators(shown, function, args, kwargs, run.iterators)
        if run.microbatch.functional:
            called, args = with_other_parameters(module, home, called, args)
        # The runtime's own use of tensors would be intercepted like the program's.
        with WithoutMode(run.microbatch.mode):
            if run.rank != home and len(args) == 1 and not kwargs:
                result = passed(run, (own,), args[0])
                if result is not None:
                    return result
            leaves, tags = run.leaves_of(args, kwargs)
            return run.run_at(
                home, Call(shown, own.key, called, args, kwargs, leaves, tags, whole=True, owner=module)
            )

    return call


def _apply(original: Function, function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``autograd.Function.apply`` in glue."""
    run = current_run()
    if run is None:
        return original(*args, **kwargs)
    if internals.is_reentrant_checkpoint(function):
        # as in torch: without an input that needs gradients, there are none inside either
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(argument, Tensor) and argument.requires_grad for argument in args[2:]
        )
        with _checkpointing(run), torch.set_grad_enabled(needs_grad), _keeping_what_escapes(run) as escaped:
            result = args[0](*args[2:])
            with WithoutMode(run.microbatch.mode):
                escaped.detach(result, run.rank)
        return result
    return _follow(run, f"autograd function {function.__qualname__}", function, original, args, kwargs)


def _script(original: Function, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a TorchScript function in glue."""
    run = current_run()
    if run is None:
        return original(*args, **kwargs)
    key = ("script", function.qualified_name)
    return _follow(run, f"TorchScript function {function.name}", key, original, args, kwargs)


def _follow(
    run: CallRunner,
    name: str,
    key: Hashable,
    original: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function as a whole where its arguments are."""
    with WithoutMode(run.microbatch.mode):
        leaves, tags = run.leaves_of(args, kwargs)
        home = highest_home(tags)
        if home is not None:
            return run.run_at(home, Call(name, key, original, args, kwargs, leaves, tags, whole=True))
    # It has only replicated tensors, but nobody can look inside: it may read gradients.
    run.settle()
    return original(*args, **kwargs)


def _checkpoint(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a checkpoint in glue: every module called inside is checkpointed separately."""
    run = current_run()
    if run is None:
        yield from original(*args, **kwargs)
        return
    # As a whole, it would run again in backward and pass its program points twice, on this rank only.
    with _checkpointing(run):
        yield


@contextlib.contextmanager
def _other_parameters(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Handle ``functional_call`` in glue: modules that run as a whole get their parameters as arguments."""
    run = current_run()
    with original(*args, **kwargs):
        if run is None:
            yield
            return
        run.microbatch.functional += 1
        run.context.replacing += 1
        try:
            yield
        finally:
            run.microbatch.functional -= 1
            run.context.replacing -= 1


@contextlib.contextmanager
def _checkpointing(run: CallRunner) -> Iterator[None]:
    run.checkpointing += 1
    try:
        yield
    finally:
        run.checkpointing -= 1


@contextlib.contextmanager
def _keeping_what_escapes(run: CallRunner) -> Iterator[EscapedFromCheckpoint]:
    around = run.escaped_from_checkpoint
    run.escaped_from_checkpoint = escaped = EscapedFromCheckpoint(around)
    try:
        yield escaped
    finally:
        run.escaped_from_checkpoint = around
