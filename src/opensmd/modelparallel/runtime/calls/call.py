"""One intercepted call, as it passes through the runtime."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.calls.descriptions.description import TensorDescription
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import AliasFamily, Tag, tag_of

__all__ = ["Call", "parents_of"]


@dataclass(slots=True)
class Call:
    """One intercepted call.

    Attributes:
        name: for error messages, and part of the key.
        key: identifies equal calls, apart from their arguments.
        leaves: the tensors in ``args`` and ``kwargs``.
        tags: their tags before the call.
        whole: whether it runs as a whole, with nothing inside intercepted.
        written: the arguments that it writes into.
        depends_on_data: whether its result's shape depends on data.
        lasting: whether its result belongs to no microbatch, like a parameter's gradient.
        owner: the module whose attributes it may set.
        parents: the tags of arguments that gradients go back to.
        serial: the number over all steps of the microbatch that owns its result; -1 if none does.
    """

    name: str
    key: Hashable
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    tags: list[Tag | None]
    whole: bool = False
    written: tuple[Tensor, ...] = ()
    depends_on_data: bool = False
    lasting: bool = False
    owner: nn.Module | None = None
    parents: tuple[Tag, ...] = ()
    serial: int = -1

    def given(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these local tensors in place of the leaves."""
        args, kwargs = self.args, self.kwargs
        if not all(map(operator.is_, tensors, self.leaves)):
            # Nearly all modules get only tensors.
            if len(args) == len(tensors) and all(map(operator.is_, args, self.leaves)):
                return tuple(tensors), kwargs
            replacements: Iterator[Any] = iter(tensors)
            args = structure.substitute(args, replacements)
            if kwargs:
                kwargs = structure.substitute(kwargs, replacements)
        return args, kwargs

    def new_tag(self, described: TensorDescription, home: int) -> Tag:
        """Return the tag of a tensor that the call returns at ``home``."""
        family: AliasFamily | None = None
        if described.shares is not None:
            # A view shares its base's gradients and changes; a mere alias in memory, only the changes.
            base = tag_of(self.leaves[described.shares])
            if base is not None and base.home == home:
                family = base.family if described.is_view else AliasFamily(base.family.memory)
        return Tag(
            home,
            described.requires_grad,
            family=family,
            parents=self.parents,
            form=described.form,
            serial=self.serial,
        )


def parents_of(tags: Sequence[Tag | None]) -> tuple[Tag, ...]:
    """Return the tags of arguments that gradients go back to."""
    parents: tuple[Tag, ...] = ()
    if torch.is_grad_enabled():
        for tag in tags:
            if tag is not None and tag.requires_grad:
                parents += (tag,)
    return parents
