"""Tensors that leave a reentrant activation checkpoint without being returned: they have no gradients.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs its function without a graph, and gives one to
what the function returns. What a hook or an attribute keeps of the inside (logits of routers) is a constant
for the rest of the program. Here the function runs with a graph, which then must end where torch's would.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import AliasFamily, Tag, put_tag, tag_of

__all__ = ["EscapedFromCheckpoint"]


class EscapedFromCheckpoint:
    """The tensors with a home that are made while a reentrant checkpoint runs its function.

    Args:
        around: those of the checkpoint around it, if there is one.
    """

    def __init__(self, around: EscapedFromCheckpoint | None) -> None:
        self.around = around
        # Most of what is made inside dies there; holding it would undo what checkpoints are for.
        self._made: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """``tensor`` has got its home."""
        self._made.append(weakref.ref(tensor))

    def detach(self, returned: Any, rank: int) -> None:
        """The function has ``returned`` something: of the others, gradients end here."""
        kept = {tag_of(leaf) for leaf in structure.tensors_in(returned)}
        for reference in self._made:
            tensor = reference()
            tag = None if tensor is None else tag_of(tensor)
            if tensor is not None and tag is not None and tag.requires_grad and tag not in kept:
                _detach(tensor, tag, rank)
        # What has left this function may still be inside the one around it.
        if self.around is not None:
            self.around._made += self._made


def _detach(tensor: Tensor, tag: Tag, rank: int) -> None:
    """A tag of its own: the old one still tells where the gradients of what is returned go."""
    detached = Tag(tag.home, family=AliasFamily(tag.family.memory), form=tag.form, serial=tag.serial)
    if tag.home == rank:
        # The home keeps the data under the same object; only its graph ends.
        detached.real = (tensor if tag.real is None else tag.real).detach()
    put_tag(tensor, detached)
