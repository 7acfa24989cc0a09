"""What is done to torch that torch has no public way for; what the engine does is undone at a step's end.

- Functions of autograd, activation checkpoints and TorchScript functions do not pass through function modes.
  They are replaced while a step runs, by versions that ask the microbatch of the calling thread, if any.
- Functions of torch.compile are run as they are written where the microbatch says so, as its compiler takes
  the function mode of the thread for a part of the program.
- A module's call is redirected by an attribute on the instance, again for the time of the step.
- ``zero_grad`` of all optimizers asks first, while a step of several microbatches runs.
- The function mode of a thread is set aside while a module runs as a whole or a backward runs.
- A scheduler's wrapper of an optimizer's ``step`` is replaced by one that follows the optimizer's class.

tests/unit/modelparallel/test_torch_internals.py fails when torch changes one of these places.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import clip_grad, parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from opensmd.modelparallel.function_modes._torch_internals import WithoutDefaultDevice

__all__ = [
    "ParametrizationCache",
    "backward_of_node",
    "compiled_where",
    "follow_class",
    "gathered",
    "has_global_hooks",
    "in_transform",
    "is_of_transform",
    "is_reentrant_checkpoint",
    "let_optimizers_ask",
    "out_of_transforms",
    "parametrization_cache",
    "put_parametrization_cache",
    "reaches",
    "replaced_backward",
    "replaced_calls",
    "replaced_functions",
    "replaced_total_norm",
    "run_backward",
    "takes_hooks",
    "unversioned",
    "watchers",
    "without_interception",
    "without_modes",
]

Function = Callable[..., Any]
# Whether autocast is on in this thread, for any kind of device.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
_REENTRANT_NODE: type = torch_checkpoint.CheckpointFunction._backward_cls
# torch 2.14 has split the first off the second, which remains for callers outside torch and calls it.
_CHECKPOINT_GENERATOR = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(torch_checkpoint, name)
)


def is_reentrant_checkpoint(function: type) -> bool:
    """Whether this autograd function is ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
    return function is torch_checkpoint.CheckpointFunction


def backward_of_node(context_class: type) -> Function:
    """What a user's function runs in backward; ``context_class`` is that of the ``ctx`` it is given."""
    function: Any = context_class._forward_cls  # type: ignore[attr-defined]
    given: Function = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    return given


def in_transform() -> bool:
    """Whether this thread is inside ``torch.func.grad``, ``vmap`` or another of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: Tensor) -> bool:
    """Whether the tensor belongs to such a transform, and has no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def out_of_transforms(tensor: Tensor) -> Tensor:
    """The tensor that those around this thread have made it from; itself where there is none around it."""
    while is_of_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class _Replaced:
    """Other attributes for a while. A class, as every step needs three: contextlib would make generators.

    Args:
        attributes: of what (of an nn.Module its dict), the name, what is to be there, and what was; None if
            nothing was.
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


def replaced_functions(
    *,
    apply: Callable[[Function, type, tuple[Any, ...], dict[str, Any]], Any],
    script: Callable[[Function, Any, tuple[Any, ...], dict[str, Any]], Any],
    checkpoint: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Send three functions of torch through the given ones, for the time of a context.

    Args:
        apply: for ``autograd.Function.apply``: (the original, the function class, args, kwargs).
        script: for calls of ``torch.jit.script`` functions: (the original, the function, args, kwargs).
        checkpoint: for the generator behind non-reentrant checkpoints: (the original, args, kwargs).
    """
    plain_apply = torch.autograd.Function.__dict__["apply"]
    plain_script = torch.jit.ScriptFunction.__call__
    plain_checkpoint: Function = getattr(torch_checkpoint, _CHECKPOINT_GENERATOR)

    def any_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # a class method written in Python until torch 2.13, in C since 2.14
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


def compiled_where(wanted: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """For the time of a context, functions of torch.compile run as they are written unless ``wanted()``."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:  # nothing has been compiled, and importing it takes seconds
        return contextlib.nullcontext()
    plain = compiler._stance
    return _Replaced([(compiler, "_stance", _Stance(plain, wanted), plain)])


class _Stance:
    """What ``torch.compiler.set_stance`` has set, or not to compile."""

    def __init__(self, plain: Any, wanted: Callable[[], bool]) -> None:
        self._plain, self._wanted = plain, wanted

    @property
    def stance(self) -> str:
        return str(self._plain.stance) if self._wanted() else "force_eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def replaced_calls(
    forwards: dict[nn.Module, Function], calls: dict[nn.Module, Function]
) -> contextlib.AbstractContextManager[None]:
    """Other functions in the place of modules' ``forward``, and of their whole call with hooks, for a while.

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


def reaches(
    roots: Sequence[Tensor], parameters: Iterable[nn.Parameter], *, nodes_named: Collection[str] = ()
) -> bool:
    """Whether a backward of ``roots`` may bring gradients to a parameter of these, or a node so named.

    What lies behind a reentrant checkpoint cannot be seen, and is taken to.
    """
    wanted = {id(parameter) for parameter in parameters}
    if any(id(root) in wanted for root in roots):
        return True
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in wanted or isinstance(node, _REENTRANT_NODE):
            return True
        if nodes_named and node.name() in nodes_named:
            return True
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return False


def let_optimizers_ask(check: Callable[[torch.optim.Optimizer, str], None]) -> Callable[[], None]:
    """Call ``check(optimizer, name)`` before any optimizer's ``step`` or ``zero_grad`` from now on.

    torch has hooks for the first (subclasses write their own ``step``) and none for the second.

    Returns:
        What ends it.
    """
    plain_zero_grad = torch.optim.Optimizer.zero_grad

    @functools.wraps(plain_zero_grad)  # scripts ask for its arguments
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        check(self, "optimizer.zero_grad")
        plain_zero_grad(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: check(optimizer, "optimizer.step"))

    def end() -> None:
        handle.remove()
        torch.optim.Optimizer.zero_grad = plain_zero_grad  # type: ignore[method-assign]

    return end


def follow_class(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.step`` be that of the class which the object has got, also where a scheduler wraps it.

    A learning-rate scheduler puts a wrapper of the ``step`` of that time into the object.

    Raises:
        ValueError: somebody else has put a ``step`` into the object, which nobody can make another.
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
    reference = weakref.ref(optimizer)  # as torch's wrapper: the object would refer to itself

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        itself: Any = reference()
        itself._opt_called = True
        return type(itself).step(itself, *args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def whole_call(module: nn.Module) -> Function:
    """What calling ``module`` runs: its hooks and forward, or what ``module.compile()`` made of them."""
    compiled: Function | None = module.__dict__.get("_compiled_call_impl")
    return module._call_impl if compiled is None else compiled


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the module has full backward hooks, which wrap its arguments and results."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def makes_weight(module: nn.Module) -> bool:
    """Whether a hook of torch's own computes the module's weight into an attribute before each forward."""
    hooks = module._forward_pre_hooks
    return bool(hooks) and any(isinstance(hook, _WEIGHT_HOOKS) for hook in hooks.values())  # asked every step


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be put on a module; scripted ones refuse them."""
    return not isinstance(module, torch.jit._script.RecursiveScriptModule)


def any_modes() -> bool:
    """Whether autocast, function modes or dispatch modes are on in this thread."""
    return (
        torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A context in which no dispatch mode sees operations: on real tensors they compute."""
    context: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return context


def watchers(module: nn.Module) -> int:
    """How many hooks see what the module is given and returns in forward, besides torch's own for weights."""
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, _WEIGHT_HOOKS)]
    return len(module._forward_hooks) + len(before)


def has_global_hooks() -> bool:
    """Whether hooks see the calls of all modules, as ``register_module_forward_hook`` adds them."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def without_interception() -> contextlib.AbstractContextManager[None]:
    """Calls of torch inside go past function modes and past parameters' own classes."""
    plain: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return plain


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
    """``torch.autograd.backward`` for gradients whose shapes and dtypes are known to be right.

    Its checks in Python take longer than the graph of a small stage.
    """
    with WithoutDefaultDevice():
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(roots),
            tuple(gradients),
            retain_graph,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The vectors of all ranks of ``group``, one after the other; past the Python of the public function."""
    everyone = mine.new_empty(mine.numel() * group.size())
    group._allgather_base(everyone, mine).wait()
    return everyone


def unversioned(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """A change of ``tensor`` in it is none to backwards that keep the tensor."""
    kept: contextlib.AbstractContextManager[None] = _unsafe_preserve_version_counter(tensor)
    return kept


def replaced_total_norm(instead: Callable[..., Tensor]) -> Callable[[], None]:
    """Let ``torch.nn.utils.clip_grad_norm_`` take norms by ``instead(original, gradients, order, ...)``.

    Returns:
        What makes it torch's own again.
    """
    plain = clip_grad._get_total_norm
    clip_grad._get_total_norm = functools.partial(instead, plain)

    def restore() -> None:
        clip_grad._get_total_norm = plain

    return restore


ParametrizationCache = tuple[int, dict[Any, Any]]


def parametrization_cache() -> ParametrizationCache | None:
    """How many regions of ``parametrize.cached()`` are open, and what they keep; None if none is."""
    enabled = parametrize._cache_enabled
    return (enabled, parametrize._cache.copy()) if enabled else None


def put_parametrization_cache(kept: ParametrizationCache | None) -> None:
    """Go on with what :func:`parametrization_cache` has given."""
    parametrize._cache_enabled, parametrize._cache = (kept[0], kept[1].copy()) if kept else (0, {})
