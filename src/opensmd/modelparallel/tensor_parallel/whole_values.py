"""Creating distributed modules with given values: first without memory, then with slices of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from opensmd.modelparallel.ranks.shards import shards_of
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_rank, tensor_size

__all__ = ["made_of"]

Module = TypeVar("Module", bound=nn.Module)


def made_of(make: Callable[[], Module], values: Mapping[str, Tensor], like: nn.Module) -> Module:
    """Create a module with these parameters, without drawing random numbers or copying whole tensors.

    Args:
        make: creates the module.
        values: whole tensors for all parameters, by name; tied ones under any of their names.
        like: the module whose training mode it gets.

    Raises:
        ValueError: values are missing or superfluous.
    """
    with torch.device("meta"):
        module = make()
    shards = shards_of(module)
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name in values and id(parameter) not in filled:
            whole = values[name].detach()
            shard = shards.get(name)
            own = whole if shard is None else shard.cut(whole, tensor_size(), tensor_rank())
            if own.shape != parameter.shape:
                raise ValueError(f"{name}: expected {tuple(parameter.shape)}, got {tuple(own.shape)}")
            own = own.clone(memory_format=torch.contiguous_format)
            filled[id(parameter)] = nn.Parameter(own, values[name].requires_grad)
    _require_same(module, values, filled)
    for owner in module.modules():
        for own_name, empty in owner._parameters.items():
            if empty is not None:
                owner._parameters[own_name] = filled[id(empty)]
    return module.train(like.training)


def _require_same(
    module: nn.Module, values: Mapping[str, Tensor], filled: Mapping[int, nn.Parameter]
) -> None:
    """Refuse a module if parameters would be lost, or would have no values."""
    named = dict(module.named_parameters(remove_duplicate=False))
    if others := sorted(values.keys() - named.keys()):
        raise ValueError(f"it has parameters that its distributed counterpart lacks: {', '.join(others[:5])}")
    if missing := sorted(name for name, parameter in named.items() if id(parameter) not in filled):
        raise ValueError(f"it lacks parameters of its distributed counterpart: {', '.join(missing[:5])}")
