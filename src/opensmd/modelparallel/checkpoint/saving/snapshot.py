"""What a checkpoint will hold, collected from the ranks; and copies of it that training does not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.checkpoint.merge import with_versions
from opensmd.modelparallel.checkpoint.saving.random_states import random_states
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["HostCopies", "Snapshot", "take_snapshot"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """This rank's part of a checkpoint.

    Attributes:
        folder, tag: where it goes.
        partial: each rank of the first replica has its part; otherwise the first rank has everything.
        model, optimizer, user_content: what is saved; None leaves it out.
        random: the states of this rank's random number generators.
        kept: how many partial checkpoints stay in the folder; None keeps all.
        weights_only: refuse what loads only with trust.
    """

    folder: Path
    tag: str
    partial: bool
    model: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    user_content: Any
    random: dict[str, Any] | None
    kept: int | None
    weights_only: bool


def take_snapshot(
    folder: Path,
    tag: str,
    *,
    partial: bool,
    model: ModelState | None,
    optimizer: Any,
    user_content: Any,
    translate: bool,
    kept: int | None,
    weights_only: bool,
) -> Snapshot:
    """Collect what there is to save; called on all ranks.

    Args:
        translate: give a whole model of distributed Hugging Face modules that library's names.
    """
    first = state.groups.rank_in(CommGroup.RDP_GROUP) == 0
    whole: dict[str, Any] | None = None
    states: dict[str, Any] | None = None
    if optimizer is not None:
        # where replicas share the optimizer's state out, all of them give their slices
        states = optimizer.local_state_dict() if partial else optimizer.state_dict(gather_to_rank0=True)
    if model is not None and (first or state.cfg.shards_parameters):  # or all replicas have parts of it
        whole = model.local_state_dict() if partial else model.state_dict(gather_to_rank0=True)
    if translate and not partial and whole:
        for to_huggingface, _ in state.module_manager.translate_functions:
            whole = to_huggingface(whole)
    return Snapshot(
        folder=folder,
        tag=tag,
        partial=partial,
        model=whole if first else None,
        optimizer=states if first else None,
        user_content=user_content,
        random=random_states() if partial and model is not None else None,
        kept=kept,
        weights_only=weights_only,
    )


class HostCopies:
    """Memory of the host that snapshots are copied to, used again by the next one of the same shapes."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with copies of all tensors; those of the one before are no longer valid."""
        tensors = structure.tensors_in(snapshot)
        copies: dict[tuple[Any, ...], Tensor] = {}
        buffers: dict[int, Tensor] = {}
        for tensor in tensors:
            if (place := _place(tensor)) not in copies:  # tied tensors stay tied
                number = len(copies)
                buffers[number] = copies[place] = self._copy(tensor, self._buffers.get(number))
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()  # the copies are complete
        self._buffers = buffers
        copied: Snapshot = structure.substitute(snapshot, iter([copies[_place(each)] for each in tensors]))
        if copied.model is not None and snapshot.model is not None:
            return replace(copied, model=with_versions(copied.model, snapshot.model))
        return copied

    def _copy(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu().clone()
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
