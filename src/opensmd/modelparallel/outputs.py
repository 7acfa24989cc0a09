"""What a step returns: the combined results of its microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepOutput", "merge_results", "rebuild_mapping", "rebuild_sequence"]

_WAY_OUT = (
    "it holds one tensor for each microbatch. Make one of them with reduce_mean(), reduce_sum(), concat() or "
    "stack(), or take .outputs"
)


@dataclass(frozen=True, eq=False)
class StepOutput:
    """One tensor of a step's result, once per microbatch.

    Attributes:
        outputs: the tensors, in the order of the microbatches.
    """

    outputs: list[Tensor]

    def reduce_mean(self) -> Tensor:
        """The mean over microbatches; same shape as each output."""
        count = len(self.outputs)
        return (self.outputs[0] if count == 1 else self.reduce_sum()) / count

    def reduce_sum(self) -> Tensor:
        """The sum over microbatches; same shape as each output."""
        return torch.stack(self.outputs).sum(0)

    def concat(self) -> Tensor:
        """The outputs concatenated along their first axis; scalars become a vector."""
        return self.stack() if self.outputs[0].dim() == 0 else torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The outputs stacked along a new first axis of length ``microbatches``."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """These outputs without their graphs."""
        return StepOutput([output.detach() for output in self.outputs])

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead, because scripts mistake a step's result for a tensor."""
        text = f"StepOutput has no attribute {name!r}"
        if name == "backward":
            text += ": call model.backward(loss) inside the smp.step function"
        elif hasattr(Tensor, name):
            text += f": {_WAY_OUT}"
        raise AttributeError(text, name=name, obj=self)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> Any:
        """Refuse torch's functions, which take tensors."""
        name = torch.overrides.resolve_name(func) or func
        raise TypeError(f"{name} was given a StepOutput: {_WAY_OUT}")

    def _no_operator(self, *_: Any) -> Any:
        """Refuse an operator; Python looks operators up in the class, bypassing ``__getattr__``."""
        raise TypeError(f"a StepOutput is neither a number nor a tensor: {_WAY_OUT}")

    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _no_operator
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __getitem__ = __float__ = __int__ = _no_operator

    def __format__(self, spec: str) -> str:
        return str(self._no_operator()) if spec else repr(self)


def merge_results(results: Sequence[Any]) -> Any:
    """Merge the microbatches' results into one of the same structure.

    Tensors become :class:`StepOutput`; lists, tuples and mappings (dict subclasses keep their class) are
    searched; anything else becomes a list with one entry per microbatch.

    Raises:
        ValueError: the microbatches returned different structures.
    """
    return _merge(list(results), "the step's result")


def _merge(values: list[Any], where: str) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values) and any(map(_has_structure, values)):
        kinds = [type(value).__name__ for value in values]
        raise ValueError(
            f"{where} differs between microbatches: {', '.join(kinds)}; return the same from each"
        )
    if isinstance(first, Tensor):
        return StepOutput(values)
    if isinstance(first, Mapping):
        _require_equal([list(value) for value in values], where, "keys")
        merged = {key: _merge([value[key] for value in values], f"{where}[{key!r}]") for key in first}
        return rebuild_mapping(first, merged)
    if isinstance(first, (list, tuple)) and not isinstance(first, torch.Size):
        _require_equal([len(value) for value in values], where, "length")
        items = [_merge([value[i] for value in values], f"{where}[{i}]") for i in range(len(first))]
        return rebuild_sequence(first, items)
    return values


def _has_structure(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple))


def _require_equal(values: list[Any], where: str, what: str) -> None:
    for microbatch, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{where} differs between microbatches: {what} {values[0]!r} in microbatch 0, {value!r} in "
                f"microbatch {microbatch}; return the same from each"
            )


def rebuild_mapping(like: Any, items: Mapping[Any, Any]) -> Any:
    """Return a mapping of the class of ``like`` with other values."""
    if type(like) is dict:
        return dict(items)
    rebuilt = copy.copy(like)
    for key, value in items.items():
        rebuilt[key] = value
    return rebuilt


def rebuild_sequence(like: Any, items: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the class of ``like`` with other items."""
    if type(like) is list:
        return items
    if type(like) is tuple:
        return tuple(items)
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
