"""Finding the arguments that a call writes into.

Below autograd, torch's schemas say so, including keyword arguments and ``out=``. Above it, where whole
functions are visible, torch's names and conventions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.runtime.tensors.functions import Function, functions_of, setter

__all__ = ["CHANGES_FIRST", "STATISTICS", "written_by_function", "written_by_operation"]


def written_by_operation(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operation writes into, as seen by a dispatch mode.

    Args:
        operation: an overload (``torch.ops.aten.add_.Tensor``); nothing is known about others.
        args, kwargs: its arguments.
    """
    if not isinstance(operation, torch._ops.OpOverload) or not operation._schema.is_mutable:
        return []
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(operation._schema.arguments)
        if argument.is_write
    ]
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def written_by_function(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the tensors that one of torch's functions writes into, as seen by a function mode."""
    if kwargs.get("out") is not None:
        return _tensors(kwargs["out"])
    if function in CHANGES_FIRST:
        return _tensors(args[0] if args else next(iter(kwargs.values()), None))
    if kwargs.get("inplace") is True:
        return _tensors(args[0] if args else kwargs.get("input"))
    return _statistics(function, args, kwargs) if function in STATISTICS else ()


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _in_place(names: Iterable[str]) -> Iterable[str]:
    not_operators = {"__init__", "__init_subclass__", "__int__", "__index__", "__iter__", "__invert__"}
    for name in names:
        if name.endswith("__"):
            if name == "__setitem__" or (name.startswith("__i") and name not in not_operators):
                yield name
        elif name.endswith("_") and not name.startswith("__"):
            yield name


# Functions that write into their first argument, or the tensors in it.
CHANGES_FIRST: frozenset[Function] = frozenset(
    functions_of(Tensor, _in_place(dir(Tensor)))
    | functions_of(torch, _in_place(dir(torch)))
    | functions_of(torch.nn.functional, _in_place(dir(torch.nn.functional)))
    | functions_of(torch.nn.init, _in_place(dir(torch.nn.init)))
    | {setter(name) for name in ("data", "grad")}
)

# Functions that update running statistics among their arguments without changing versions: the index of the
# first of the two, and the index, name and default of the argument that requests it.
STATISTICS: dict[Function, tuple[int, int, str, bool]] = {
    torch.nn.functional.batch_norm: (1, 5, "training", False),
    torch.nn.functional.instance_norm: (1, 5, "use_input_stats", True),
    torch.batch_norm: (3, 5, "training", False),
    torch.instance_norm: (3, 5, "use_input_stats", True),
}


def _statistics(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    first, place, name, default = STATISTICS[function]
    if not (args[place] if len(args) > place else kwargs.get(name, default)):
        return ()
    both = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return tuple(tensor for tensor in both if isinstance(tensor, Tensor))
