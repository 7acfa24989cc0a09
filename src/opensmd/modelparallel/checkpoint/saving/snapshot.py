"""The content of a checkpoint, collected from the ranks, and copies of it that training does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensmd.modelparallel.checkpoint.saved_optimizer import SavedOptimizer
from opensmd.modelparallel.checkpoint.saving.collecting import spread_in, with_entries
from opensmd.modelparallel.checkpoint.saving.copying import Copying, can_be_copied_later
from opensmd.modelparallel.checkpoint.saving.random_states import random_states
from opensmd.modelparallel.checkpoint.saving.sharded_names import with_flat_groups, with_module
from opensmd.modelparallel.ranks.composite import composed, form_of, plain_parts
from opensmd.modelparallel.ranks.gathered import Gathered, noting_gathered
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.spread import Spread, left_in_pieces
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.memory_layout import contiguous_strides, strides_kept, strides_of
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.merge import with_versions
from opensmd.modelparallel.state_dicts.model_state import ModelState
from opensmd.modelparallel.tensor_parallel.huggingface.optimizer_state import original_state
from opensmd.modelparallel.tensor_parallel.huggingface.originals import as_original

__all__ = ["HostCopies", "Snapshot", "take_snapshot"]

Copies = dict[tuple[Any, ...], Tensor]  # by the source's place in memory
Later = tuple[Tensor, Tensor]  # a source still to be copied, and its target


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """This rank's part of a checkpoint.

    Attributes:
        folder, tag: where to write it.
        partial: whether each rank of the first replica has its part; otherwise the first rank has everything.
        model, optimizer, user_content: what is saved; None leaves it out. In a partial checkpoint, tensors
            that ranks share are in pieces (``Spread``); ranks that do not write have only these.
        random: the states of this rank's random number generators.
        kept: how many partial checkpoints stay in the folder; None keeps all.
        weights_only: whether to refuse what loads only with trust.
        gathered: what was made for this snapshot only, and needs no copy.
        between: called between pieces of the work.
        copying: the copies made during training; None if the snapshot has the tensors themselves.
    """

    folder: Path
    tag: str
    partial: bool
    model: Any
    optimizer: Any
    user_content: Any
    random: dict[str, Any] | None
    kept: int | None
    weights_only: bool
    gathered: Gathered | None = None
    between: Callable[[], None] | None = None
    copying: Copying | None = None

    def rest(self) -> None:
        """Between pieces of work, leave the core to training if it needs it."""
        if self.between is not None:
            self.between()

    def require_untouched(self) -> None:
        """Wait until everything has been copied.

        Raises:
            SMPCheckpointError: something was written meanwhile.
        """
        if self.copying is not None:
            self.copying.require_untouched()


def take_snapshot(
    folder: Path,
    tag: str,
    *,
    partial: bool,
    model: ModelState | None,
    optimizer: SavedOptimizer | None,
    user_content: Any,
    translate: bool,
    kept: int | None,
    weights_only: bool,
) -> Snapshot:
    """Collect what is to be saved; all ranks must call.

    Args:
        translate: use Hugging Face's names for a whole model of distributed Hugging Face modules.
    """
    random = random_states() if partial and model is not None else None
    content = _parts(model, optimizer) if partial else _whole(model, optimizer, translate=translate)
    return Snapshot(
        folder=folder,
        tag=tag,
        partial=partial,
        model=content.model,
        optimizer=content.optimizer,
        user_content=user_content,
        random=random,
        kept=kept,
        weights_only=weights_only,
        gathered=content.gathered,
    )


@dataclass(frozen=True)
class _Content:
    """State dicts of model and optimizer, and what was gathered for them."""

    model: Any
    optimizer: Any
    gathered: Gathered | None = None


def _whole(model: ModelState | None, optimizer: SavedOptimizer | None, *, translate: bool) -> _Content:
    """Collect everything on the first rank; all ranks must call."""
    first = state.groups.rank_in(CommGroup.RDP_GROUP) == 0
    whole: dict[str, Any] | None = None
    states: dict[str, Any] | None = None
    with noting_gathered() as gathered:
        if optimizer is not None:
            # if replicas share the optimizer's state, all of them contribute their slices
            states = optimizer.state_dict(gather_to_rank0=True)
        if model is not None and (first or state.cfg.shards_parameters):  # or every replica has parts of it
            whole = model.state_dict(gather_to_rank0=True)
    if not first:
        return _Content(None, None)
    if translate and state.model is not None:
        module = state.model.get_module()
        if whole:
            whole = as_original(module, whole)
        if states and optimizer is not None:
            states = original_state(module, states, optimizer._smp_names_of_groups())
    return _Content(whole, states, gathered)


def _parts(model: ModelState | None, optimizer: SavedOptimizer | None) -> _Content:
    """Collect this rank's part, or its pieces of the first replica's part."""
    rank = state.groups.rank_in(CommGroup.RDP_GROUP)
    has_pieces = state.cfg.shards_parameters or state.cfg.shard_optimizer_state
    if rank >= (state.groups.shards.size() if has_pieces else 1):
        return _Content(None, None)
    with left_in_pieces() as pieces:
        own = None if model is None else model.local_state_dict()
        states = None if optimizer is None else optimizer.local_state_dict()
        values = own
        if own is None and state.cfg.shards_parameters:  # scripts look parameters up in the optimizer's file
            values = cast("ModelState", state.model).local_state_dict()
    own, states, values = (with_entries(each, pieces.of) for each in (own, states, values))
    if state.cfg.shards_parameters and own is not None:
        own = with_module(own)
    if state.cfg.shards_parameters and states is not None and optimizer is not None:
        states = with_flat_groups(states, values or {}, optimizer._smp_names(), pieces)
    return _Content(own, states) if rank == 0 else _Content(spread_in(own), spread_in(states))


class HostCopies:
    """Host memory for copies of snapshots, reused by the next one with the same shapes."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of all that others may change; this invalidates the previous one.

        What only optimizers write is copied later; see ``Snapshot.copying``.
        """
        gathered, snapshot = snapshot.gathered, replace(snapshot, gathered=None)
        tensors: list[Tensor] = []
        data = structure.dump_if_possible(snapshot, tensors)
        if data is None:  # writing refuses what cannot be pickled
            tensors = structure.tensors_in(snapshot)
        copies, later = self._copied([part for tensor in tensors for part in plain_parts(tensor)], gathered)
        found = [
            composed(form_of(tensor), iter([copies[_place(each)] for each in plain_parts(tensor)]))
            for tensor in tensors
        ]
        copied: Snapshot = (
            structure.substitute(snapshot, iter(found)) if data is None else structure.load(data, found)
        )
        if data is None and copied.model is not None and snapshot.model is not None:
            copied = replace(copied, model=with_versions(copied.model, snapshot.model))
        return replace(copied, copying=Copying(later, _names_in(snapshot)))

    def _copied(self, parts: Sequence[Tensor], gathered: Gathered | None) -> tuple[Copies, list[Later]]:
        """Return copies of plain tensors by their place, and which of them are still to be filled."""
        trained = _trained_memory()
        copies: Copies = {}
        buffers: dict[int, Tensor] = {}
        later: list[Later] = []
        for tensor in parts:
            if (place := _place(tensor)) in copies:  # tied tensors stay tied
                continue
            if tensor.device.type == "cpu" and gathered is not None and gathered.has_all_of(tensor):
                copies[place] = tensor  # nobody else has it
                continue
            number = len(copies)
            buffer = _buffer_for(tensor, self._buffers.get(number))
            buffers[number] = copies[place] = buffer
            if can_be_copied_later(tensor) and tensor.untyped_storage()._cdata in trained:
                later.append((tensor.detach(), buffer))
            elif tensor.layout is not torch.strided:
                copies[place] = tensor.detach().cpu().clone()
            else:
                buffer.copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in parts):
            torch.cuda.current_stream().synchronize()  # completes what was copied at once
        self._buffers = buffers
        return copies, later


def _buffer_for(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Return host memory in the tensor's layout, which fused optimizers take for the parameter's."""
    shape, dtype = tensor.shape, tensor.dtype
    strides = strides_kept(shape, strides_of(tensor)) or contiguous_strides(shape)
    if before is not None and (before.shape, before.dtype, before.stride()) == (shape, dtype, strides):
        return before
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)


def _trained_memory() -> frozenset[int]:
    """Return the memory that only optimizers write, which does not happen until their next step."""
    module = nn.Module() if state.model is None else state.model.get_module()
    trained: list[Any] = [each for each in module.parameters() if each.requires_grad]
    for optimizer in state.optimizers.values():
        trained += [list(group["params"]) for group in optimizer.param_groups]
        trained += optimizer.state.values()
    others = [*module.buffers(), *_written_by_forward(module)]
    return structure.memory_of(trained) - structure.memory_of(others)


def _written_by_forward(module: nn.Module) -> list[Tensor]:
    """Return parameters that their own module changes: embeddings with ``max_norm``."""
    modules = [each for each in module.modules() if getattr(each, "max_norm", None) is not None]
    return [parameter for each in modules for parameter in each.parameters(recurse=False)]


def _names_in(snapshot: Snapshot) -> Callable[[Tensor], str]:
    """Return a function that names the snapshot's tensors in errors."""

    def name_of(tensor: Tensor) -> str:
        place = _place(tensor)
        for name, each in _items(snapshot.model):
            if _is_at(each, place):
                return str(name)
        for number, entries in _items(_entry(snapshot.optimizer, "state")):
            for key, each in _items(entries):
                if _is_at(each, place):
                    return f"the optimizer's {key} of parameter {number}"
        return f"a tensor of shape {tuple(tensor.shape)}"

    return name_of


def _items(found: Any) -> Iterable[tuple[Any, Any]]:
    return found.items() if isinstance(found, Mapping) else ()


def _entry(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None


def _is_at(value: Any, place: tuple[Any, ...]) -> bool:
    tensor = value.piece if isinstance(value, Spread) else value
    return isinstance(tensor, Tensor) and _place(tensor) == place


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
