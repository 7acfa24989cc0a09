"""What an operation or module returns: the rank that runs it announces it to those that hold placeholders.

A description is made once for each key (what was called, with which arguments, in which modes) and kept on
every rank. Keys use only what all ranks agree on, and a message with a description is found by a hash of its
key, so it does not matter which microbatch needed it first. Where a result depends on data in more than its
numbers, its description travels every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.memory_layout import contiguous_strides, is_sparse, strides_of
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.runtime.tensors.tags import Form

__all__ = [
    "Before",
    "Change",
    "Description",
    "Found",
    "Hidden",
    "Left",
    "Passed",
    "TensorDescription",
    "describe",
    "version_of",
]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a result.

    Attributes:
        argument: it is this argument itself.
        shares: it shares memory with this argument.
        is_view: and autograd knows it as a view of it.
        form: what a tag knows of it.
        is_contiguous: its strides are those that torch gives to its shape.
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
        # Made once: every tag of every microbatch refers to this one tuple.
        object.__setattr__(self, "form", (self.shape, self.stride, self.dtype))
        object.__setattr__(self, "is_contiguous", self.stride == contiguous_strides(self.shape))

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is what was described, as far as the other ranks rely on it."""
        # Strides may differ from call to call (a transposed input): messages go by those of the tag.
        return (
            self.shape == tensor.shape
            and self.dtype == tensor.dtype
            and self.requires_grad == tensor.requires_grad
        )

    def placeholder(self) -> Placeholder:
        """A tensor like it without data."""
        # Given strides, torch takes twice as long, and a rank makes a placeholder for nearly every call.
        stride = None if self.is_contiguous else self.stride
        return Placeholder.of_form(self.shape, stride, self.dtype, local_device(self.device))


class Change(NamedTuple):
    """An argument that was changed in place.

    Attributes:
        argument: its number.
        requires_grad: whether it requires gradients now.
        numbers_alone: it has the memory and the form that it had before.
    """

    argument: int
    requires_grad: bool
    numbers_alone: bool


@dataclass(frozen=True, slots=True)
class Left:
    """What a call left outside its result, for the ranks on which it did not run (see ``effects.py``).

    Attributes:
        pickled: (states of objects by number, attributes by submodule and name, containers in these, numbers
            of tensors on all ranks), referring to tensors by number: the call's arguments, what the objects
            held before, the result's, then ``tensors``.
        contents: those of lists and mappings (see ``containers.py``), with the same numbers.
        tensors: further ones that the call made.
    """

    pickled: bytes
    contents: bytes
    tensors: tuple[TensorDescription, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a call left outside its result, at its home; see :class:`Left`."""

    pickled: bytes
    contents: bytes
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Description:
    """A result without its data.

    Attributes:
        form: "tensor", "tuple", "list", "none", or "pickle" for anything else, which is then in ``pickled``.
        tensors: the tensors in it; with "pickle" they come after the operation's arguments.
        changed: arguments that were changed in place.
        depends_on_data: it must be sent anew each time.
        left: what the call left outside its result, if anything.
        refers: ``pickled`` refers to lists, mappings or dataclasses among the call's arguments.
        is_plain: a further call like it has nothing to announce and changes nothing.
        new_tensor: of a plain call, its result, if that is one tensor and none of its arguments.
    """

    form: str
    tensors: tuple[TensorDescription, ...]
    changed: tuple[Change, ...] = ()
    depends_on_data: bool = False
    pickled: bytes = b""
    left: Left | None = None
    refers: bool = False

    is_plain: bool = field(init=False)
    new_tensor: TensorDescription | None = field(init=False)

    def __post_init__(self) -> None:
        # Once and for all: every further call of its kind asks.
        object.__setattr__(
            self, "is_plain", not self.depends_on_data and not self.changed and self.left is None
        )
        # Nearly all calls are plain and return one new tensor: that case must cost no search.
        alone = self.form == "tensor" and self.tensors[0].argument is None
        object.__setattr__(self, "new_tensor", self.tensors[0] if self.is_plain and alone else None)

    def build(self, tensors: Sequence[Any], containers: Sequence[Any] = ()) -> Any:
        """The result with ``tensors`` in it, and with the call's own ``containers`` if it refers to them."""
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
    """What calls that follow each other leave, each given one tensor that the one before has made.

    Attributes:
        points: how many program points they pass after the first tensor has been brought.
        result: of the last one.
    """

    points: int
    result: TensorDescription


@dataclass(slots=True)
class Hidden:
    """A result taken apart: its tensors, and its form."""

    form: str
    tensors: list[Tensor]
    pickled: bytes = b""
    has_values: bool = False
    refers: bool = False

    @classmethod
    def of(cls, result: Any, what: str, containers: Callable[[], Sequence[Any]] = tuple) -> Hidden:
        """Take a result apart.

        Args:
            result: what a call returned.
            what: the call, for messages.
            containers: tells the lists, mappings and dataclasses among its arguments; one that comes back is
                to be the same one on all ranks.

        Raises:
            SMPUnsupportedError: it has parts that cannot be sent to another rank.
        """
        if isinstance(result, Tensor):
            return cls("tensor", [result])
        if result is None:
            return cls("none", [])
        if type(result) in (tuple, list) and all(isinstance(each, Tensor) for each in result):
            alone = len(set(map(id, result))) == len(result)
            given = type(result) is list and any(each is result for each in containers())
            if alone and not given:  # otherwise the others must know which are the same
                return cls(type(result).__name__, list(result))
        # What is left is rare: dicts, dataclasses, the same tensor twice.
        tensors: list[Tensor] = []
        try:
            pickled, refers = structure.dump_referring(result, tensors, containers())
        # Objects raise whatever they like when they are pickled.
        except Exception as error:
            raise SMPUnsupportedError(
                f"what {what} returned cannot be described to the other pipeline ranks: {error}. Return "
                "tensors, or lists, tuples, dicts and dataclasses of them that are defined at the top of a "
                "module"
            ) from error
        return cls("pickle", tensors, pickled, _has_values(result), refers)


def _has_values(result: Any) -> bool:
    """Whether anything but tensors, None and containers is in it, which may differ from call to call."""
    if result is None or isinstance(result, Tensor):
        return False
    if isinstance(result, (tuple, list)):
        return any(map(_has_values, result))
    if isinstance(result, Mapping):
        return any(map(_has_values, result.values()))
    if structure.is_dataclass(result):
        return any(_has_values(getattr(result, field.name, None)) for field in dataclasses.fields(result))
    return True


def describe(
    parts: Hidden,
    arguments: Sequence[Tensor],
    *,
    before: Sequence[Before],
    foreign: Sequence[bool],
    depends_on_data: bool,
    destinations: Collection[int] = (),
    written: Collection[int] = (),
    left: Found | None = None,
) -> Description:
    """What the home tells of a result.

    Args:
        parts: the result.
        arguments: the real tensors that went in.
        before: what they were before the call.
        foreign: arguments that had come from another home, or are copies.
        depends_on_data: the shapes or values may differ from call to call.
        destinations: the arguments that the operation writes into, whatever their versions say.
        written: memory that was changed in place, for inference tensors, which have no versions.
        left: what is left outside the result.
    """
    # Of several arguments in one memory the first stands for all: their placeholders share it, too.
    by_memory: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        if _has_memory(argument):
            # The first of several in one memory, so that all ranks name the same one.
            by_memory.setdefault(argument.untyped_storage()._cdata, number)
    return Description(
        form=parts.form,
        tensors=tuple(_describe_tensor(each, arguments, by_memory, foreign) for each in parts.tensors),
        changed=tuple(
            Change(number, argument.requires_grad, before[number].has_form_of(argument))
            for number, argument in enumerate(arguments)
            # Versions tell of most changes. Not of those that write what was there (versions count, data do
            # not), of sparse tensors (to coalesce one counts), nor of inference tensors, which have no
            # versions.
            if number in destinations
            or (version_of(argument) != before[number].version and not is_sparse(argument))
            or (argument.is_inference() and argument.untyped_storage()._cdata in written)
        ),
        depends_on_data=depends_on_data or parts.has_values,
        pickled=parts.pickled,
        refers=parts.refers,
        left=None
        if left is None
        else Left(
            left.pickled,
            left.contents,
            tuple(_describe_tensor(each, arguments, by_memory, foreign) for each in left.tensors),
        ),
    )


class Before(NamedTuple):
    """What an argument was before a call."""

    version: int
    memory: int
    form: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Before:
        """Describe the tensor as it is now."""
        return cls(version_of(tensor), *_place(tensor))

    def has_form_of(self, tensor: Tensor) -> bool:
        """Whether the tensor has the same memory and form now."""
        return (self.memory, self.form) == _place(tensor)


def _place(tensor: Tensor) -> tuple[int, Any]:
    if not _has_memory(tensor):
        return 0, tensor.shape
    return tensor.untyped_storage()._cdata, (tensor.shape, tensor.stride(), tensor.dtype)


def version_of(tensor: Tensor) -> int:
    """How often the tensor has been changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _describe_tensor(
    tensor: Tensor, arguments: Sequence[Tensor], by_memory: Mapping[int, int], foreign: Sequence[bool]
) -> TensorDescription:
    # A copy that was fetched is the argument of this rank alone: returned, it is a new tensor to the
    # others.
    same = next((n for n, each in enumerate(arguments) if each is tensor and not foreign[n]), None)
    shares = by_memory.get(tensor.untyped_storage()._cdata) if _has_memory(tensor) else None
    is_view = False
    # Autograd sends changes through views it knows; memory that is shared behind its back (detach) is not
    # one.
    if shares is not None and tensor._is_view():
        base = arguments[shares]
        is_view = tensor._base is base or (base._is_view() and tensor._base is base._base)
    return TensorDescription(
        shape=tuple(tensor.shape),
        stride=strides_of(tensor),
        dtype=tensor.dtype,
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
        argument=same,
        shares=shares,
        is_view=is_view,
    )


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) is not Placeholder and tensor.layout is torch.strided


def local_device(kind: str) -> torch.device:
    """This rank's device of a kind."""
    if kind == "cpu":
        return _CPU
    return torch.device(kind, torch.accelerator.current_device_index())


def check_result(description: Description, parts: Hidden, what: str) -> None:
    """Raise where a result is not what the other ranks expect.

    Raises:
        SMPError: the shapes, dtypes or number of tensors differ.
    """
    # Asked of every call after the first: the others have gone on with what the first one said.
    if len(parts.tensors) == len(description.tensors) and all(
        described.fits(tensor) for described, tensor in zip(description.tensors, parts.tensors, strict=True)
    ):
        return
    expected = [(each.shape, each.dtype, each.requires_grad) for each in description.tensors]
    found = [(tuple(each.shape), each.dtype, each.requires_grad) for each in parts.tensors]
    raise SMPError(
        f"{what} returned {found} for arguments for which it returned {expected} before (shape, dtype, "
        "requires_grad). The other pipeline ranks cannot know which: its result must depend on the "
        "structure, shapes and dtypes of its arguments and on train/eval mode only. Place it and what uses "
        "its result on one partition with smp.set_partition"
    )
