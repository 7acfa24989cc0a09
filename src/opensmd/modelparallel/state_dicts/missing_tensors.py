"""Stand-ins for tensors that live elsewhere, while a module saves or loads its state.

Modules customize their state dicts: hooks rename or merge entries, and newer versions of a class convert what
older ones saved. That code expects a whole module. With meta tensors of the right shapes for what is on other
ranks, it runs unchanged on every rank; entries that come out real are this rank's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder

__all__ = ["has_data", "loads_by_itself", "stand_ins"]


@contextlib.contextmanager
def stand_ins(module: nn.Module, is_here: Callable[[str], bool]) -> Iterator[None]:
    """Temporarily replace the parameters and buffers of ``module`` that are not here by meta tensors.

    Args:
        module: the user's module.
        is_here: whether the tensor of this name has its data on this rank.
    """
    twins: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for prefix, submodule in module.named_modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and (isinstance(tensor, Placeholder) or not is_here(full)):
                    replaced.append((table, name, tensor))
    for table, name, tensor in replaced:
        if id(tensor) not in twins:
            twins[id(tensor)] = _without_data(tensor)
        table[name] = twins[id(tensor)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def has_data(value: Any) -> bool:
    """Whether an entry of a state dict created under :func:`stand_ins` is this rank's."""
    return not (isinstance(value, Tensor) and value.is_meta)


def loads_by_itself(module: nn.Module) -> bool:
    """Whether code outside torch decides which names and shapes a part of ``module`` accepts."""
    return any(
        submodule._load_state_dict_pre_hooks
        or not type(submodule)._load_from_state_dict.__module__.startswith("torch.nn.")
        or type(submodule).load_state_dict is not nn.Module.load_state_dict
        for submodule in module.modules()
    )


def _without_data(tensor: Tensor) -> Tensor:
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    )
