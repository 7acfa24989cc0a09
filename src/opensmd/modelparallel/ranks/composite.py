"""Taking apart and reassembling tensors made of other tensors, such as quantized weights.

Their class says how (torch's ``__tensor_flatten__``). They have no memory of their own, so code that sends,
compares or copies memory uses their parts. DTensors are excluded, because their parts are on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "Form",
    "composed",
    "empty_parts",
    "form_of",
    "inside",
    "is_composite",
    "plain_parts",
    "take_parts",
]


@dataclass(frozen=True)
class Form:
    """What describes a composite tensor besides its parts.

    Attributes:
        kind: its class.
        parts: the forms of its parts by name; None for plain tensors.
        context: what else its class needs.
        shape, strides: its own.
    """

    kind: Any
    parts: dict[str, Form | None]
    context: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def is_composite(tensor: Tensor) -> bool:
    """Whether the tensor is made of others; DTensors do not count."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def form_of(tensor: Tensor) -> Form | None:
    """Return what :func:`composed` needs; None for a plain tensor."""
    if not is_composite(tensor):
        return None
    named, context = inside(tensor)
    inner = {name: form_of(part) for name, part in named.items()}
    return Form(type(tensor), inner, context, tuple(tensor.shape), tensor.stride())


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of; a plain one is its own part."""
    if not is_composite(tensor):
        return [tensor]
    return [each for part in inside(tensor)[0].values() for each in plain_parts(part)]


def composed(form: Form | None, parts: Iterator[Tensor]) -> Tensor:
    """Reassemble a tensor of this form from the next plain ones, in the order of :func:`plain_parts`."""
    if form is None:
        return next(parts)
    inner = {name: composed(each, parts) for name, each in form.parts.items()}
    made: Tensor = form.kind.__tensor_unflatten__(inner, form.context, torch.Size(form.shape), form.strides)
    return made


def take_parts(tensor: Tensor, other: Tensor) -> None:
    """Make a composite tensor use the parts of ``other``, which has the same class."""
    for name, part in inside(other)[0].items():
        setattr(tensor, name, part)


def empty_parts(tensor: Tensor) -> None:
    """Free the data of a composite tensor; its parts keep their shapes."""
    for name, part in inside(tensor)[0].items():
        if is_composite(part):
            empty_parts(part)
        else:  # methods of its class may read it; on the meta device that is harmless
            without_data = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
            setattr(tensor, name, without_data)


def inside(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the parts of a composite tensor by name, and what else its class needs."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context
