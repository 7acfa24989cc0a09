"""``@smp.step``: run a function once per microbatch and combine the results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, overload

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.microbatch import split_arguments
from opensmd.modelparallel.model import DistributedModel, StepCall
from opensmd.modelparallel.outputs import merge_results
from opensmd.modelparallel.runtime import tensor_memory
from opensmd.modelparallel.state import state

__all__ = ["step"]

Function = Callable[..., Any]


@overload
def step(function: Function) -> Function: ...
@overload
def step(
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Function], Function]: ...


def step(
    function: Function | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Mark a function as the forward and backward of one batch; use bare, with ``()`` or with keywords.

    Tensors in the arguments are cut into ``microbatches`` pieces, and the function runs for each. Returned
    tensors become :class:`~opensmd.modelparallel.outputs.StepOutput`, other values lists.

    In a class body, a function whose first parameter is called ``self`` is a method; any other gets only the
    arguments it is called with, even through an instance.

    Args:
        function: the function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: the batch axes of arguments, where not 0.
        detach_outputs: detach returned tensors from their graphs.

    Raises:
        TypeError: ``function`` is not a function, or an option is neither a list of names nor a dict of axes.
        ValueError: at the call, if the number of microbatches does not divide the batch.
        SMPError: at the call, without a ``smp.DistributedModel``.
    """
    _check_options(non_split_inputs, input_split_axes)
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    _check_function(function)
    batch_function: Function = function

    @functools.wraps(batch_function)
    def run(*args: Any, **kwargs: Any) -> Any:
        model = state.require("smp.step").model
        if not isinstance(model, DistributedModel):
            raise SMPError("a smp.step function was called before smp.DistributedModel wrapped a model")

        def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            return split_arguments(
                batch_function,
                args,
                kwargs,
                microbatches=state.cfg.microbatches,
                non_split_inputs=non_split_inputs or (),
                input_split_axes=input_split_axes,
            )

        results = model.run_step(StepCall(batch_function, args, kwargs, split, detach_outputs))
        tensor_memory.end_step()
        return merge_results(results)

    return run if _takes_its_instance(batch_function) else staticmethod(run)


def _check_function(function: Function) -> None:
    if not callable(function):
        raise TypeError(
            f"smp.step: expected a function, got {type(function).__name__}; options are given by name, as in "
            "@smp.step(non_split_inputs=['mask'])"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"smp.step: {function.__qualname__} is a coroutine or generator, which runs only when somebody "
            "waits for its values; write it as a plain function that returns them"
        )


def _takes_its_instance(function: Function) -> bool:
    """Whether a function in a class body is a method; trainers also call others through their instance."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:  # builtins without a signature
        return True
    return first is not None and (first.name in ("self", "cls") or first.kind is first.VAR_POSITIONAL)


def _check_options(names: object, axes: object) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence | Set | None):
        raise TypeError(f"smp.step: non_split_inputs must be a list of argument names, got {names!r}")
    if not isinstance(axes, Mapping | None) or not all(
        isinstance(axis, int) for axis in (axes or {}).values()
    ):
        raise TypeError(f"smp.step: input_split_axes must be a dict of argument names and axes, got {axes!r}")
