"""What the engine knows of torch's functions by name: which read values, change arguments or draw numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.calls.keys import argument_key

__all__ = [
    "CHANGES_FIRST",
    "DEPENDS_ON_DATA",
    "KNOWN_EVERYWHERE",
    "RANDOM",
    "READS_VALUE",
    "getter",
    "indexes_by_mask",
    "setter",
    "statistics",
]

Function = Callable[..., Any]


def _of(owner: Any, names: str) -> set[Function]:
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


def getter(name: str) -> Function:
    """The function behind reading the attribute ``name`` of a tensor."""
    found: Function = getattr(Tensor, name).__get__
    return found


def setter(name: str) -> Function:
    """The function behind setting the attribute ``name`` of a tensor."""
    found: Function = getattr(Tensor, name).__set__
    return found


def _getters(names: str) -> set[Function]:
    return {getter(name) for name in names.split() if hasattr(Tensor, name)}


# Answers that a placeholder has itself.
KNOWN_EVERYWHERE: frozenset[Function] = frozenset(
    _getters(
        "shape dtype device layout ndim is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_sparse_csr "
        "is_mkldnn is_quantized is_nested names itemsize nbytes"
    )
    | _of(
        Tensor,
        "size dim stride numel nelement element_size ndimension is_floating_point is_complex is_contiguous "
        "get_device __len__ is_signed is_same_size storage_offset is_inference is_conj is_neg __hash__ "
        "is_pinned is_shared",
    )
    | _of(torch, "is_floating_point is_complex numel is_tensor is_conj is_inference is_storage")
)

# Answers that need the data and become Python values, so every rank must be told.
READS_VALUE: frozenset[Function] = frozenset(
    _of(
        Tensor,
        "item tolist __bool__ __int__ __float__ __index__ __complex__ __repr__ __format__ numpy __array__ "
        "__contains__ is_nonzero equal allclose",
    )
    | _of(torch, "equal allclose is_nonzero")
)


def _in_place_names(names: Iterable[str]) -> Iterable[str]:
    not_operators = {"__init__", "__init_subclass__", "__int__", "__index__", "__iter__", "__invert__"}
    for name in names:
        if name.endswith("__"):
            if name == "__setitem__" or (name.startswith("__i") and name not in not_operators):
                yield name
        elif name.endswith("_") and not name.startswith("__"):
            yield name


# Operations that write into their first argument and so run at its home.
CHANGES_FIRST: frozenset[Function] = frozenset(
    _of(Tensor, " ".join(_in_place_names(dir(Tensor))))
    | _of(torch, " ".join(name for name in _in_place_names(dir(torch)) if callable(getattr(torch, name))))
    | _of(torch.nn.functional, "relu_ elu_ celu_ selu_ leaky_relu_ rrelu_ hardtanh_ threshold_")
    | {setter(name) for name in ("data", "grad")}
)

# Operations that draw random numbers; on replicated tensors all ranks must draw the same.
RANDOM: frozenset[Function] = frozenset(
    _of(
        torch,
        "rand randn randint rand_like randn_like randint_like bernoulli multinomial normal poisson randperm "
        "dropout dropout_ alpha_dropout feature_dropout feature_alpha_dropout rrelu binomial",
    )
    | _of(
        torch.nn.functional,
        "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d gumbel_softmax rrelu "
        "scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d",
    )
    | _of(
        Tensor,
        "bernoulli bernoulli_ normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_ "
        "multinomial",
    )
)

# Python swaps the sides of a comparison whose right side is a placeholder, on the ranks that hold one.
COMPARISONS: frozenset[Function] = frozenset(_of(Tensor, "eq ne lt gt le ge"))
_SWAPPED = {Tensor.gt: Tensor.lt, Tensor.ge: Tensor.le}


def in_fixed_order(function: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """The comparison of two tensors, in the form that all ranks agree on whichever side came first."""
    if function in _SWAPPED:
        return _SWAPPED[function], (args[1], args[0])
    if function in (Tensor.eq, Tensor.ne) and repr(argument_key(args[0])) > repr(argument_key(args[1])):
        return function, (args[1], args[0])
    return function, args


# Operations whose result's shape depends on data.
DEPENDS_ON_DATA: frozenset[Function] = frozenset(
    _of(torch, "nonzero masked_select unique argwhere unique_consecutive bincount")
    | _of(Tensor, "nonzero masked_select unique argwhere unique_consecutive bincount")
    | _of(Tensor, "indices values _indices _values col_indices row_indices")  # of sparse tensors
    | {getter("grad")}
)


def indexes_by_mask(function: Function, tensors: list[Tensor]) -> bool:
    """Whether this is ``tensor[mask]``, as long as the mask has ones."""
    return function is Tensor.__getitem__ and any(
        each.dtype in (torch.bool, torch.uint8) for each in tensors[1:]
    )


# Operations that update running statistics among their arguments, without a trace in these tensors' versions:
# the place of the first of the two, and the place, name and default of what asks for it.
_STATISTICS: dict[Function, tuple[int, int, str, bool]] = {
    torch.nn.functional.batch_norm: (1, 5, "training", False),
    torch.nn.functional.instance_norm: (1, 5, "use_input_stats", True),
    torch.batch_norm: (3, 5, "training", False),
    torch.instance_norm: (3, 5, "use_input_stats", True),
}


def statistics(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The running statistics that a call updates."""
    if function not in _STATISTICS:
        return ()
    first, place, name, default = _STATISTICS[function]
    if not (args[place] if len(args) > place else kwargs.get(name, default)):
        return ()
    both = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return tuple(each for each in both if isinstance(each, Tensor))
