"""Tensors that leave a reentrant activation checkpoint without being returned: they have no gradients.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs its function without a graph, and gives one only
to the result. What a hook or attribute keeps from the inside (router logits) is a constant for the rest of
the program. Here the function runs with a graph, which must end where torch's would.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import AliasFamily, Tag, put_tag, tag_of

__all__ = ["EscapedFromCheckpoint"]


class EscapedFromCheckpoint:
    """The tensors with a home that are created while a reentrant checkpoint runs its function.

    Args:
        around: those of the enclosing checkpoint, if any.
    """

    def __init__(self, around: EscapedFromCheckpoint | None) -> None:
        self.around = around
        # Most of what is created inside dies there; holding it would defeat the purpose of checkpoints.
        self._made: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Note that ``tensor`` has got its home."""
        self._made.append(weakref.ref(tensor))

    def detach(self, returned: Any, rank: int) -> None:
        """End the gradients of all tensors except those that the function has ``returned``."""
        kept = {tag_of(leaf) for leaf in structure.tensors_in(returned)}
        for reference in self._made:
            tensor = reference()
            tag = None if tensor is None else tag_of(tensor)
            if tensor is not None and tag is not None and tag.requires_grad and tag not in kept:
                _detach(tensor, tag, rank)
        # What has left this function may still be inside the enclosing one.
        if self.around is not None:
            self.around._made += self._made


def _detach(tensor: Tensor, tag: Tag, rank: int) -> None:
    """Give it a new tag: the old one still says where gradients of the returned tensors go."""
    detached = Tag(tag.home, family=AliasFamily(tag.family.memory), form=tag.form, serial=tag.serial)
    if tag.home == rank:
        # The home keeps the data in the same object; only its graph ends.
        detached.real = (tensor if tag.real is None else tag.real).detach()
    put_tag(tensor, detached)
