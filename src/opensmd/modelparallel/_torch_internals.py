"""What this package asks of torch, or calls in it, without a public interface.

Replacements of torch's own functions are in ``redirection``, and function modes in ``function_modes``.
tests/unit/modelparallel/test_torch_internals.py fails when torch changes anything used here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import _disable_current_modes

from opensmd.modelparallel.function_modes._torch_internals import WithoutDefaultDevice

__all__ = [
    "ParametrizationCache",
    "any_autocast",
    "any_modes",
    "backward_of_node",
    "gathered_vectors",
    "gathering",
    "has_backward_hooks",
    "has_global_hooks",
    "in_transform",
    "is_compiled",
    "is_of_transform",
    "is_reentrant_checkpoint",
    "is_returned_by_compile",
    "makes_weight",
    "out_of_transforms",
    "parametrization_cache",
    "put_parametrization_cache",
    "reaches",
    "run_backward",
    "runs_step_hooks",
    "takes_hooks",
    "unversioned",
    "watchers",
    "whole_call",
    "without_interception",
    "without_modes",
]

Function = Callable[..., Any]
_Step = TypeVar("_Step", bound=Function)
# Whether autocast is on in this thread, for any kind of device.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
_AT_ONCE = AllgatherOptions()
_AT_ONCE.asyncOp = False
_REENTRANT_NODE: type = torch_checkpoint.CheckpointFunction._backward_cls


def is_reentrant_checkpoint(function: type) -> bool:
    """Whether this autograd function is ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
    return function is torch_checkpoint.CheckpointFunction


def backward_of_node(context_class: type) -> Function:
    """Return what a user's function runs in backward, given the class of its ``ctx``."""
    function: Any = context_class._forward_cls  # type: ignore[attr-defined]
    backward: Function = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    return backward


def in_transform() -> bool:
    """Whether this thread is inside a transform such as ``torch.func.grad`` or ``vmap``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: Tensor) -> bool:
    """Whether the tensor belongs to such a transform, and has no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def out_of_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that the transforms of this thread have wrapped, or ``tensor`` itself outside any."""
    while is_of_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def reaches(
    roots: Sequence[Tensor], parameters: Iterable[nn.Parameter], *, nodes_named: Collection[str] = ()
) -> bool:
    """Whether a backward of ``roots`` may reach one of ``parameters``, or a node of ``nodes_named``.

    What lies behind a reentrant checkpoint cannot be seen, and counts as reached.
    """
    targets = {id(parameter) for parameter in parameters}
    if any(id(root) in targets for root in roots):
        return True
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in targets or isinstance(node, _REENTRANT_NODE):
            return True
        if nodes_named and node.name() in nodes_named:
            return True
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return False


def whole_call(module: nn.Module) -> Function:
    """What calling ``module`` runs: its hooks and forward, or what ``module.compile()`` made of them."""
    compiled: Function | None = module.__dict__.get("_compiled_call_impl")
    return module._call_impl if compiled is None else compiled


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` compiles it."""
    return module._compiled_call_impl is not None or is_returned_by_compile(module)


def is_returned_by_compile(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned it; found out without loading the compiler."""
    maker: Any = sys.modules.get("torch._dynamo.eval_frame")
    return maker is not None and isinstance(module, maker.OptimizedModule)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the module has full backward hooks, which wrap its arguments and results."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def makes_weight(module: nn.Module) -> bool:
    """Whether one of torch's own hooks computes the module's weight into an attribute before each forward."""
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
    """Return a context that hides operations from dispatch modes, so that real tensors are computed."""
    context: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return context


def watchers(module: nn.Module) -> int:
    """Count the hooks that see the module's inputs or outputs in forward, except torch's own for weights."""
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, _WEIGHT_HOOKS)]
    return len(module._forward_hooks) + len(before)


def has_global_hooks() -> bool:
    """Whether hooks see the calls of all modules, as those of ``register_module_forward_hook`` do."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def without_interception() -> contextlib.AbstractContextManager[None]:
    """Return a context in which calls of torch bypass function modes and parameter subclasses."""
    plain: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return plain


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
    """Run ``torch.autograd.backward`` for gradients whose shapes and dtypes are known to be right.

    torch's checks in Python take longer than the graph of a small stage.
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


def gathered_vectors(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather and join the vectors of all ranks of ``group``, without the public function's overhead."""
    everyone = mine.new_empty(mine.numel() * group.size())
    work = group._allgather_base(everyone, mine, _AT_ONCE)
    if work is not None:  # smddp has then gathered, without waking a thread for it
        work.wait()
    return everyone


def gathering(mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Like :func:`gathered_vectors`; the result is there when the second has been waited for."""
    everyone = mine.new_empty(mine.numel() * group.size())
    return everyone, group._allgather_base(everyone, mine)


def runs_step_hooks(step: _Step) -> _Step:
    """Mark an optimizer's ``step`` as one that runs its hooks, as it calls a ``step`` of torch's that does.

    Otherwise torch wraps it in one that runs them, too, when the optimizer loads state.
    """
    step.hooked = True  # type: ignore[attr-defined]
    return step


def unversioned(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context in which changes of ``tensor`` go unnoticed by backwards that have saved it."""
    preserved: contextlib.AbstractContextManager[None] = _unsafe_preserve_version_counter(tensor)
    return preserved


ParametrizationCache = tuple[int, dict[Any, Any]]


def parametrization_cache() -> ParametrizationCache | None:
    """Return the number of open ``parametrize.cached()`` regions and what they cache; None without any."""
    enabled = parametrize._cache_enabled
    return (enabled, parametrize._cache.copy()) if enabled else None


def put_parametrization_cache(cache: ParametrizationCache | None) -> None:
    """Restore what :func:`parametrization_cache` returned."""
    parametrize._cache_enabled, parametrize._cache = (cache[0], cache[1].copy()) if cache else (0, {})
