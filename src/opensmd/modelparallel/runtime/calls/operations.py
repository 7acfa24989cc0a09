"""Which of torch's functions, by name, read values, draw random numbers or depend on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.calls.keys import argument_key
from opensmd.modelparallel.runtime.tensors.functions import Function, functions_of, getter

__all__ = [
    "COMPARISONS",
    "DEPENDS_ON_DATA",
    "RANDOM",
    "READS_VALUE",
    "SELECTS",
    "in_fixed_order",
    "indexes_by_mask",
]

# Their answers need the data and become Python values, so the home sends them to every rank.
READS_VALUE: frozenset[Function] = frozenset(
    functions_of(
        Tensor,
        "item tolist __bool__ __int__ __float__ __index__ __complex__ __repr__ __format__ numpy __array__ "
        "__contains__ is_nonzero equal allclose",
    )
    | functions_of(torch, "equal allclose is_nonzero")
)


def _drawing(owner: Any) -> set[Function]:
    """Return the functions of ``owner`` whose operations torch has tagged as random."""
    functions = set()
    for name in dir(owner):
        operation = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
        if operation is not None and callable(getattr(owner, name)):
            overloads = (getattr(operation, overload) for overload in operation.overloads())
            if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
                functions.add(getattr(owner, name))
    return functions


# Operations that draw random numbers; on replicated tensors all ranks must draw the same.
RANDOM: frozenset[Function] = frozenset(
    _drawing(torch)
    | _drawing(Tensor)
    | _drawing(torch.nn.functional)
    | functions_of(
        torch.nn.functional,
        "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d gumbel_softmax rrelu "
        "rrelu_ scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d "
        "fractional_max_pool3d",
    )
    | functions_of(
        torch.nn.init,
        "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ "
        "orthogonal_ sparse_",
    )
)

# These index their first argument. Reordering a key-value cache by the last stage's choice, as in beam
# search, must leave each stage's entries there.
SELECTS: frozenset[Function] = frozenset({torch.index_select, Tensor.index_select})

# Python swaps the sides of a comparison if the right side is a placeholder, so on some ranks only.
COMPARISONS: frozenset[Function] = frozenset(functions_of(Tensor, "eq ne lt gt le ge"))
_SWAPPED = {Tensor.gt: Tensor.lt, Tensor.ge: Tensor.le}


def in_fixed_order(function: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """Return a comparison of two tensors in the form that all ranks agree on, whichever side came first."""
    if function in _SWAPPED:
        return _SWAPPED[function], (args[1], args[0])
    if function in (Tensor.eq, Tensor.ne) and repr(argument_key(args[0])) > repr(argument_key(args[1])):
        return function, (args[1], args[0])
    return function, args


# Operations whose result's shape depends on data.
DEPENDS_ON_DATA: frozenset[Function] = frozenset(
    functions_of(torch, "nonzero masked_select unique argwhere unique_consecutive bincount")
    | functions_of(Tensor, "nonzero masked_select unique argwhere unique_consecutive bincount")
    | functions_of(Tensor, "indices values _indices _values col_indices row_indices")  # for sparse tensors
    | {getter("grad")}
)


def indexes_by_mask(function: Function, tensors: list[Tensor]) -> bool:
    """Whether this is ``tensor[mask]``, whose length is the number of ones in the mask."""
    return function is Tensor.__getitem__ and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors[1:]
    )
