"""What an operation or module returns, without its data, for the ranks that hold placeholders.

A description is made once per key (what was called, with which arguments, in which modes) and kept on every
rank. If more than a result's values depends on data, its description travels every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.memory_layout import contiguous_strides
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.runtime.tensors.tags import Form

__all__ = ["Change", "Description", "LeftDescription", "Passed", "TensorDescription", "local_device"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a result.

    Attributes:
        argument: the argument that it is, if any.
        shares: the argument that it shares memory with, if any.
        is_view: whether autograd knows it as a view of that argument.
        form: what a tag knows about it.
        is_contiguous: whether its strides are torch's default for its shape.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    argument: int | None = None
    shares: int | None = None
    is_view: bool = False
    form: Form = field(init=False)
    is_contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        # Created once; every tag of every microbatch refers to this tuple.
        object.__setattr__(self, "form", (self.shape, self.stride, self.dtype))
        object.__setattr__(self, "is_contiguous", self.stride == contiguous_strides(self.shape))

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor matches the description, as far as the other ranks rely on it."""
        # Strides may differ between calls (a transposed input); messages use those of the tag.
        return (
            self.shape == tensor.shape
            and self.dtype == tensor.dtype
            and self.requires_grad == tensor.requires_grad
        )

    def placeholder(self) -> Placeholder:
        """Return a tensor like it without data."""
        # With explicit strides, torch takes twice as long, and a rank creates a placeholder for nearly every
        # call.
        stride = None if self.is_contiguous else self.stride
        return Placeholder.of_form(self.shape, stride, self.dtype, local_device(self.device))


class Change(NamedTuple):
    """An argument that was changed in place.

    Attributes:
        argument: its index.
        requires_grad: whether it now requires gradients.
        numbers_alone: whether only its values changed, not its memory or form.
        form: its shape and strides, if they have changed (``out=``, ``unsqueeze_``).
    """

    argument: int
    requires_grad: bool
    numbers_alone: bool
    form: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class LeftDescription:
    """What a call left outside its result, for the ranks that did not run it (see ``effects.py``).

    Attributes:
        pickled: (states of objects by number, attributes by submodule and name, containers in these, numbers
            of tensors on all ranks), referring to tensors by number: the call's arguments, what the objects
            held before, the result's, then ``tensors``.
        contents: those of lists and mappings (see ``containers.py``), with the same numbering.
        tensors: further ones that the call created.
        data: that of tensors which all ranks are to have, by their place in ``tensors``.
    """

    pickled: bytes
    contents: bytes
    tensors: tuple[TensorDescription, ...]
    data: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Description:
    """A result without its data.

    Attributes:
        form: "tensor", "tuple", "list", "none", or "pickle" for anything else, which is then in ``pickled``.
        tensors: its tensors; with "pickle" they come after the operation's arguments.
        changed: arguments that were changed in place.
        depends_on_data: whether it must be sent again each time.
        left: what the call left outside its result, if anything.
        refers: whether ``pickled`` refers to lists, mappings or dataclasses among the call's arguments.
        is_plain: whether further calls like it announce and change nothing.
        new_tensor: a plain call's result, if that is a single new tensor.
    """

    form: str
    tensors: tuple[TensorDescription, ...]
    changed: tuple[Change, ...] = ()
    depends_on_data: bool = False
    pickled: bytes = b""
    left: LeftDescription | None = None
    refers: bool = False

    is_plain: bool = field(init=False)
    new_tensor: TensorDescription | None = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because every further call like it asks.
        object.__setattr__(
            self, "is_plain", not self.depends_on_data and not self.changed and self.left is None
        )
        # Nearly all calls are plain and return one new tensor; that case must not cost a search.
        alone = self.form == "tensor" and self.tensors[0].argument is None
        object.__setattr__(self, "new_tensor", self.tensors[0] if self.is_plain and alone else None)

    def build(self, tensors: Sequence[Any], containers: Sequence[Any] = ()) -> Any:
        """Build the result with ``tensors``, and with the call's own ``containers`` if it refers to them."""
        if self.form == "tensor":
            return tensors[0]
        if self.form == "tuple":
            return tuple(tensors)
        if self.form == "list":
            return list(tensors)
        if self.form == "none":
            return None
        return structure.load(self.pickled, tensors, containers)


class Passed(NamedTuple):
    """The outcome of consecutive calls, each with one tensor from the previous call.

    Attributes:
        points: how many program points they pass after the first tensor has been brought.
        result: that of the last one.
    """

    points: int
    result: TensorDescription


def local_device(kind: str) -> torch.device:
    """Return this rank's device of a kind."""
    if kind == "cpu":
        return _CPU
    return torch.device(kind, torch.accelerator.current_device_index())
