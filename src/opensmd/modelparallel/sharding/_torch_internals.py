"""The private parts of torch's FSDP2 that sharded models need, in one place.

tests/ranks/replicas/test_sharded_model.py fails loudly when torch changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from opensmd.modelparallel._torch_internals import without_interception

__all__ = [
    "by_hand",
    "drop_gradients",
    "gather_root",
    "gathered_parameters",
    "gradients_found",
    "has_hooks",
    "hooked_parameter",
    "local_part",
    "make_memory",
    "reduce_now",
    "zeros_where",
]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for a parameter's gradient."""
    with without_interception():  # parameters without data refuse what they do not know
        return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooked_parameter(module: FSDPModule) -> nn.Parameter | None:
    """Return a sharded parameter of a unit with hooks that never run; FSDP2 runs those after accumulation."""
    return next(
        (
            parameter.sharded_param
            for parameter in _parameters(module)
            if parameter.sharded_param._backward_hooks
        ),
        None,
    )


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's part itself, not a copy."""
    return tensor._local_tensor


def by_hand(module: FSDPModule) -> None:
    """Disable the hooks on calls of ``module``, which is gathered and reduced by hand from now on."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._lazy_init()


def gradients_found(module: FSDPModule) -> list[tuple[nn.Parameter, bool]]:
    """Return the sharded parameters of a unit, and whether each has an unreduced gradient."""
    return [(parameter.sharded_param, _gradient(parameter) is not None) for parameter in _parameters(module)]


def make_memory(units: Sequence[FSDPModule]) -> None:
    """Gather parameters once outside inference mode, because no step could train with memory created in it.

    Args:
        units: the root last.
    """
    with torch.inference_mode(False):
        units[-1]._get_fsdp_state()._lazy_init()
        for unit in units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                group.unshard()
                group.wait_for_unshard()
                group.reshard()


def gather_root(root: FSDPModule) -> None:
    """Gather what lies outside of blocks: a step may call parts of the model, and never the whole of it."""
    root._get_fsdp_state()._lazy_init()
    root.unshard()


def gathered_parameters(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The sharded parameters of a unit that is gathered, and what is in their places meanwhile."""
    return [(parameter.sharded_param, parameter.unsharded_param) for parameter in _parameters(module)]


def zeros_where(module: FSDPModule, wanted: Mapping[int, bool]) -> None:
    """Give zero gradients to gathered parameters without one, if other ranks have one.

    Args:
        wanted: ids of sharded parameters.
    """
    for parameter in _parameters(module):
        if wanted[id(parameter.sharded_param)] and _gradient(parameter) is None:
            parameter.unsharded_param.grad = parameter.unsharded_param.new_zeros(
                parameter.unsharded_param.shape
            )


def drop_gradients(module: FSDPModule) -> None:
    """Drop unreduced gradients."""
    for parameter in _parameters(module):
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        # Since torch 2.15 this is the gradient above, and cannot be set.
        if parameter.unsharded_accumulated_grad is not None:
            parameter.unsharded_accumulated_grad = None


def reduce_now(module: FSDPModule) -> None:
    """Reduce this unit's accumulated gradients, and release its gathered parameters."""
    state = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.post_backward()
        group.finalize_backward()  # type: ignore[no-untyped-call]
    for group in state._fsdp_param_groups:
        group.comm_ctx.reduce_scatter_states.clear()


def _gradient(parameter: Any) -> Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        gradient: Tensor = parameter.unsharded_accumulated_grad
        return gradient
    gathered: nn.Parameter | None = getattr(parameter, "_unsharded_param", None)
    return None if gathered is None else gathered.grad


def _parameters(module: FSDPModule) -> list[Any]:
    return [
        parameter for group in module._get_fsdp_state()._fsdp_param_groups for parameter in group.fsdp_params
    ]
