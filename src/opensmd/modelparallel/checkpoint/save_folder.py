"""``smp.save_checkpoint``: a folder with all that training needs.

Partial: ``{tag}_partial/`` with ``model_{rank}.pt``, ``optimizer_{rank}.pt``, ``random_{ranks}.pt`` and
``user_content.pt``. Full: the model as the file ``{tag}``, ``optimizer_{tag}`` and ``user_content_{tag}``.
The text file ``newest`` names the last complete one, ``{tag}_partial`` or ``{tag}``. It is replaced at the
very end, so a kill leaves the previous checkpoint in place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opensmd.modelparallel.checkpoint.agreement import meet_for_files, together
from opensmd.modelparallel.checkpoint.newest import NEWEST
from opensmd.modelparallel.checkpoint.saved_optimizer import SavedOptimizer
from opensmd.modelparallel.checkpoint.saving.background import (
    BackgroundSave,
    finish_background_save,
    save_in_background,
)
from opensmd.modelparallel.checkpoint.saving.snapshot import take_snapshot
from opensmd.modelparallel.checkpoint.saving.writing import SavingGroups, write_snapshot
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["save_checkpoint"]

_LONGEST_TAG = 200  # bytes; the names of temporary files add up to 50, and file systems take 255


def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: ModelState | None = None,
    optimizer: SavedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    weights_only: bool = True,
    blocking: bool = True,
) -> BackgroundSave | None:
    """Save a checkpoint in the folder ``path``; all ranks must call, after the first step.

    Args:
        path: a folder, created if missing.
        tag: the checkpoint's name, the same on all ranks.
        partial: each rank of the first replica writes its part. False: write one file with the whole model,
            and one with the whole optimizer's state, which plain PyTorch reads.
        model, optimizer: what to save; None leaves it out.
        user_content: returned on resuming; tensors, plain values, and whatever else ``smp.load`` accepts
            without trust. In partial checkpoints of sharded parameters, a dict (or None) also gets
            ``buffer_names`` and ``param_shapes``.
        translate_if_full: use Hugging Face's names in a full checkpoint of a distributed Hugging Face model.
        num_kept_partial_checkpoints: how many partial checkpoints to keep; older ones are deleted.
        weights_only: False also saves what loads only with ``weights_only=False``.
        blocking: False lets a thread copy and write. The next save waits for it, and raises if it has failed.
            Code that changes parameters or optimizer state before the next ``optimizer.step`` must call
            ``wait_until_copied()`` first.

    Returns:
        None; with ``blocking=False``, an object with ``wait()``, ``wait_until_copied()`` and ``done``.

    Raises:
        ValueError: there is nothing to save, or ``tag`` is not a valid file name.
        TypeError: ``model`` is not a DistributedModel or ``optimizer`` not a DistributedOptimizer, ``path``
            or ``tag`` is not a string, or something in the content would not load again.
        SMPCheckpointError: another rank could not write; ``newest`` is unchanged.
        SMPError: inside a step of a split model.
        OSError: this rank could not write; ``newest`` is unchanged.
    """
    groups = state.require("smp.save_checkpoint").groups
    failed = f"the checkpoint {tag!r} in {path} was not saved"
    meet_for_files("smp.save_checkpoint", CommGroup.DP_GROUP, failed=failed)
    _require_saveable(path, tag, model, optimizer, user_content)
    finish_background_save()
    if partial and model is not None and state.cfg.shards_parameters:
        user_content = _with_shapes(user_content, model)
    world = groups[CommGroup.WORLD]
    snapshot = together(
        world,
        lambda: take_snapshot(
            Path(path).absolute(),  # the script may go to another folder before a thread writes
            tag,
            partial=partial,
            model=model,
            optimizer=optimizer,
            user_content=user_content,
            translate=translate_if_full,
            kept=num_kept_partial_checkpoints,
            weights_only=weights_only,
        ),
        failed=failed,
        rank="rank",
    )
    if not blocking:
        return save_in_background(snapshot)
    own = SavingGroups(world=world, replica=groups[CommGroup.MP_GROUP], shards=groups.shards)
    write_snapshot(snapshot, own)
    return None


def _require_saveable(
    path: object, tag: object, model: object, optimizer: object, user_content: object
) -> None:
    if model is not None and not isinstance(model, ModelState):
        raise TypeError(
            f"smp.save_checkpoint: expected a smp.DistributedModel, got {type(model).__name__}; save others "
            "with torch.save"
        )
    if optimizer is not None and not hasattr(optimizer, "local_state_dict"):
        raise TypeError(
            f"smp.save_checkpoint: expected what smp.DistributedOptimizer returned, got "
            f"{type(optimizer).__name__}"
        )
    if model is None and user_content is None and optimizer is None:
        raise ValueError("smp.save_checkpoint: nothing to save; give model, optimizer or user_content")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"smp.save_checkpoint: path={path!r} must be the name of a folder")
    _require_name(tag)


def _require_name(tag: object) -> None:
    if not isinstance(tag, str):
        raise TypeError(f"smp.save_checkpoint: the tag {tag!r} must be a text, such as {str(tag)!r}")
    if {"/", "\0"} & set(tag) or tag in ("", ".", ".."):
        raise ValueError(
            f"smp.save_checkpoint: the tag {tag!r} cannot be the name of a file: leave out slashes and null "
            "characters, or put folders into the path"
        )
    if (size := len(os.fsencode(tag))) > _LONGEST_TAG:
        raise ValueError(
            f"smp.save_checkpoint: the tag {tag[:20]!r}… has {size} bytes; give one of at most "
            f"{_LONGEST_TAG}, because it is part of files' names"
        )
    if tag == NEWEST:
        raise ValueError(
            f"smp.save_checkpoint: the tag {tag!r} is the name of the file that says which checkpoint is the "
            "newest; give another"
        )


def _with_shapes(user_content: Any, model: ModelState) -> Any:
    """Add to the user's dict, if any, what scripts look up in it to convert sharded checkpoints."""
    if user_content is not None and not isinstance(user_content, dict):
        return user_content
    module = model.get_module()
    return {
        **(user_content or {}),
        "buffer_names": [name for name, _ in module.named_buffers()],
        "param_shapes": {name: tuple(parameter.shape) for name, parameter in module.named_parameters()},
    }
