"""Tensors that leave a module other than in its result, and that the other ranks therefore lack.

A module that runs as a whole does so on one rank. What its hooks keep, or what it appends to a list of the
script's, exists only there. Without a tag, such a tensor would be mistaken for a replicated one, and ranks
would diverge. So untagged tensors are checked where they are used.

    first stage    h = layer(x)    AUX.append(h)       loss + sum(AUX)   the first stage's h
    second stage   (placeholder)   nothing             loss + sum(AUX)   nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import reaches
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.messages.edges import RECEIVED
from opensmd.modelparallel.runtime.tensors.storages import StorageReference, lies_in
from opensmd.modelparallel.runtime.tensors.tags import Tag

__all__ = ["EscapedTensors"]

_WAY = (
    "Return it from the module, or keep it in an attribute of the module (self.losses = [...]). Forward "
    "hooks that are registered before the first step, and run in it, may carry tensors out"
)


class EscapedTensors:
    """What is known about tensors that only this rank has.

    Args:
        parameters: the model's.
        replicated_memory: that of buffers that are equal on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicated_memory: frozenset[int]) -> None:
        self._parameters = parameters
        self._replicated_memory = replicated_memory
        self._seen: dict[int, tuple[StorageReference, str]] = {}

    def note(self, tensor: Tensor, story: str) -> None:
        """Note that a hook has seen this tensor; ``story`` is the explanation if it is used outside."""
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = (StorageReference(storage), story)

    def forget(self) -> None:
        """Forget tensors whose memory has been freed."""
        self._seen = {number: seen for number, seen in self._seen.items() if not seen[0].expired()}

    def require_replicated(self, leaves: Iterable[Tensor], tags: Iterable[Tag | None], place: str) -> None:
        """Raise if an untagged one of ``leaves`` exists only here.

        Raises:
            SMPUnsupportedError: one does; ``place`` says where the microbatch is.
        """
        for leaf, tag in zip(leaves, tags, strict=True):
            if tag is not None:
                continue
            if self._seen and leaf.layout is torch.strided:
                seen = self._seen.get(leaf.untyped_storage()._cdata)
                if seen is not None and not seen[0].expired():
                    raise SMPUnsupportedError(f"{seen[1]}. {_WAY}")
            # Without a graph nothing tells whose it is; most likely all ranks have made it alike.
            if leaf.requires_grad and leaf.grad_fn is not None and self._is_of_a_stage(leaf):
                raise SMPUnsupportedError(
                    f"after {place}: a tensor of shape {tuple(leaf.shape)} was computed inside a module that "
                    "runs on one partition as a whole, and got out of it by another way than its result "
                    "(through a hook, or a list or dict of the script): the other ranks do not have it. "
                    f"{_WAY}"
                )

    def _is_of_a_stage(self, tensor: Tensor) -> bool:
        """Whether its graph exists on a single rank: it contains parameters, or received tensors."""
        return not lies_in(tensor, self._replicated_memory) and reaches(
            [tensor], self._parameters, nodes_named=RECEIVED
        )
