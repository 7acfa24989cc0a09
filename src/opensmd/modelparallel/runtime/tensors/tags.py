"""Where a tensor's data is: the tag that every tensor with a home carries, on every rank.

A tensor without a tag is replicated: real on all ranks of the pipeline. Tags are the same on all ranks. So
their ``requires_grad`` comes only from descriptions, never from the tensor at hand.

Tensors that share memory share more than their home::

    h = layer(x)       Tag ─┐
                            ├─ AliasFamily: gradients ─┐
    v = h.view(-1)     Tag ─┘                          ├─ Memory: in-place changes
                                                       │
    d = h.detach()     Tag ─── AliasFamily ────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.tensors.memory_layout import is_sparse, strides_of

__all__ = [
    "AliasFamily",
    "Form",
    "Memory",
    "Tag",
    "ancestors",
    "count_changes",
    "form_of",
    "highest_home",
    "origins_of",
    "put_origin",
    "put_tag",
    "real_tensor",
    "remove_tag",
    "tag_of",
    "tags_of",
    "tensor_key",
]

Form = tuple[Sequence[int], Sequence[int], torch.dtype]
ATTRIBUTE = "_opensmd_tag"
_ORIGIN = "_opensmd_origin"


class Memory:
    """What all tensors in the same memory share.

    Attributes:
        changes: in-place changes so far; older copies on other ranks are sent again.
        invalidated: why the tensors that still point here can no longer be used.
    """

    __slots__ = ("changes", "invalidated")

    def __init__(self) -> None:
        self.changes = 0
        self.invalidated: str | None = None


class AliasFamily:
    """What views of one tensor share with it for autograd; detached ones share only the memory.

    Attributes:
        requires_grad: whether an in-place change has made the whole family require gradients.
        parents: what in-place changes have written into it.
    """

    __slots__ = ("memory", "parents", "requires_grad")

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.requires_grad = False
        self.parents: tuple[Tag, ...] = ()


class Tag:
    """The home of one tensor.

    Attributes:
        home: the pipeline rank that has the data.
        parents: the tensors with a home that this one was computed from, if it requires gradients.
        real: at home, the tensor with the data, if that is not the tagged one itself.
        form: the tensor's shape, strides and dtype, cached if known.
        serial: the number over all steps of the microbatch that created it; -1 if none did.
    """

    __slots__ = ("__weakref__", "_family", "_requires_grad", "form", "home", "parents", "real", "serial")

    def __init__(
        self,
        home: int,
        requires_grad: bool = False,
        *,
        family: AliasFamily | None = None,
        parents: tuple[Tag, ...] = (),
        form: Form | None = None,
        serial: int = -1,
    ) -> None:
        self.home = home
        self.form = form
        self.serial = serial
        self.parents = parents
        self.real: Tensor | None = None
        self._family = family
        self._requires_grad = requires_grad

    @property
    def family(self) -> AliasFamily:
        """What it shares with its views; most tensors have none and never need this."""
        if self._family is None:
            self._family = AliasFamily()
        return self._family

    @property
    def changes(self) -> int:
        """The number of in-place changes of the tensor's memory."""
        return 0 if self._family is None else self._family.memory.changes

    @property
    def invalidated(self) -> str | None:
        """Why the tensor can no longer be used."""
        return None if self._family is None else self._family.memory.invalidated

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow through the tensor; the same on every rank."""
        return self._requires_grad or (self._family is not None and self._family.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._requires_grad = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tag, (self.home, self.requires_grad))


def ancestors(tags: Iterable[Tag]) -> set[Tag]:
    """Return the tags and all that they depend on."""
    ancestors: set[Tag] = set()
    # Without recursion: a microbatch may have longer chains of calls than Python has stack.
    pending = list(tags)
    while pending:
        tag = pending.pop()
        if tag not in ancestors:
            ancestors.add(tag)
            pending += tag.parents
            if tag._family is not None:
                pending += tag._family.parents
    return ancestors


def count_changes(tensors: Iterable[Tensor]) -> None:
    """Note in-place changes at the tensors' homes; all ranks must call, because copies become outdated."""
    for tensor in tensors:
        tag = tag_of(tensor)
        if tag is not None:
            tag.family.memory.changes += 1


def tag_of(tensor: Tensor) -> Tag | None:
    """Return the tensor's tag; None for a replicated tensor."""
    tag: Tag | None = tensor.__dict__.get(ATTRIBUTE)
    return tag


def real_tensor(tensor: Tensor) -> Tensor:
    """Return, at its home, the tensor that has the data."""
    tag = tag_of(tensor)
    return tensor if tag is None or tag.real is None else tag.real


def form_of(tensor: Tensor, tag: Tag) -> Form:
    """Return what all ranks know about the form of a tensor with this tag."""
    return tag.form or (tensor.shape, strides_of(tensor), tensor.dtype)


def tags_of(tensors: Sequence[Tensor]) -> list[Tag | None]:
    """Return the tensors' tags."""
    tags: list[Tag | None] = []
    for tensor in tensors:  # a comprehension has its own frame, and every call comes here
        tags.append(tensor.__dict__.get(ATTRIBUTE))
    return tags


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what all ranks know about a tensor; hashable."""
    tag: Tag | None = tensor.__dict__.get(ATTRIBUTE)
    if tag is None:
        if is_sparse(tensor):
            return (tensor.shape, tensor.layout, tensor.dtype, tensor.requires_grad)
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return (tag.form or form_of(tensor, tag), tag.requires_grad, tag.home)


def put_tag(tensor: Tensor, tag: Tag) -> None:
    """Give the tensor a home."""
    tensor.__dict__[ATTRIBUTE] = tag


def put_origin(tensor: Tensor, tag: Tag) -> None:
    """Note where a tensor comes from that all ranks have since."""
    tensor.__dict__[_ORIGIN] = tag


def origins_of(tensors: Iterable[Tensor]) -> list[Tag]:
    """Return where those of the tensors come from that have no home, but a microbatch has made for all."""
    return [each.__dict__[_ORIGIN] for each in tensors if _ORIGIN in each.__dict__]


def remove_tag(tensor: Tensor) -> None:
    """Remove the tensor's home, because all ranks have its data."""
    tensor.__dict__.pop(ATTRIBUTE, None)


def highest_home(tags: Iterable[Tag | None]) -> int | None:
    """Return the home of an operation on tensors with these tags; None if all are replicated."""
    highest: int | None = None
    for tag in tags:
        if tag is not None and (highest is None or tag.home > highest):
            highest = tag.home
    return highest
