"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: a folder with all that training needs.

Partial: ``{tag}_partial/`` with ``model_{rank}.pt``, ``optimizer_{rank}.pt``, ``random_{ranks}.pt`` and
``user_content.pt``. Full: the model as the file ``{tag}``, ``optimizer_{tag}`` and ``user_content_{tag}``.
The text file ``newest`` names the last complete one, ``{tag}_partial`` or ``{tag}``. It is replaced at the
very end, so a kill leaves the previous checkpoint in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from opensmd.modelparallel.checkpoint.agreement import together
from opensmd.modelparallel.checkpoint.files import read
from opensmd.modelparallel.checkpoint.newest import NEWEST, read_newest
from opensmd.modelparallel.checkpoint.save_load import load
from opensmd.modelparallel.checkpoint.saved_optimizer import SavedOptimizer
from opensmd.modelparallel.checkpoint.saving.background import (
    BackgroundSave,
    finish_background_save,
    save_in_background,
)
from opensmd.modelparallel.checkpoint.saving.random_states import saved_random_file, set_random_states
from opensmd.modelparallel.checkpoint.saving.snapshot import take_snapshot
from opensmd.modelparallel.checkpoint.saving.writing import SavingGroups, write_snapshot
from opensmd.modelparallel.communicate import require_meeting
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from opensmd.modelparallel.tensor_parallel.huggingface.originals import as_distributed

__all__ = ["resume_from_checkpoint", "save_checkpoint"]

Wrapped = TypeVar("Wrapped")

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
    require_meeting("smp.save_checkpoint")
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
    finish_background_save()
    if partial and model is not None and state.cfg.shards_parameters:
        user_content = _with_shapes(user_content, model)
    world = groups[CommGroup.WORLD]
    failed = f"the checkpoint {tag!r} in {path} was not saved"
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


def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
    load_optimizer_states: bool | None = None,
    *,
    weights_only: bool = True,
) -> Any:
    """Load what :func:`save_checkpoint` saved into the model and optimizer; all ranks must call.

    This may come before the first step, and the degrees may have changed. A partial checkpoint with a model
    also restores the states of the random number generators.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest.
        partial: as it was saved.
        strict: as in ``load_state_dict``.
        load_optimizer: load the optimizer too, if it was saved.
        load_sharded_optimizer_state: accepted and ignored; saved state is whole, and cut as needed here.
        translate_function: applied to the full state dict before loading; None for the function of
            distributed models.
        load_optimizer_states: the name of ``load_optimizer`` in the first version that had this function.
        weights_only: False also loads objects of any type, and runs whatever code is in the files, so use it
            only for your own files.

    Returns:
        The saved ``user_content``, or None.

    Raises:
        FileNotFoundError: no such checkpoint.
        SMPCheckpointError: a file is damaged, or the newest checkpoint is full and a partial one was
            requested, or vice versa.
        SMPError: inside a step of a split model.
        ValueError: the optimizer's state does not fit; nothing has been changed.
        RuntimeError: the model's state does not fit; nothing has been changed.
    """
    groups = state.require("smp.resume_from_checkpoint").groups
    require_meeting("smp.resume_from_checkpoint")
    folder = Path(path)
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states

    finish_background_save()

    tag, user_content, random_states = together(
        groups[CommGroup.MP_GROUP],
        lambda: _read_content(folder, tag, partial=partial, weights_only=weights_only),
        failed=f"nothing of {path} was loaded",
        rank="mp_rank",
    )
    model_dict, optimizer_dict = _read_states(
        folder, tag, partial=partial, optimizer=load_optimizer, weights_only=weights_only
    )
    if model_dict is not None and translate_function is not None:
        model_dict = translate_function(model_dict)
    elif model_dict is not None and not partial and state.model is not None:
        model_dict = as_distributed(state.model.get_module(), model_dict)
    _load_into_wrapped(model_dict, optimizer_dict, strict=strict)
    if random_states is not None and model_dict is not None:
        set_random_states(random_states)
    return user_content


def _read_content(
    folder: Path, tag: str | None, *, partial: bool, weights_only: bool
) -> tuple[str, Any, Any]:
    """Read the checkpoint's tag, the user's content, and the states of random number generators."""
    wanted = read_newest(folder, partial=partial) if tag is None else tag
    _require(folder, wanted, partial=partial)
    content = folder / (f"{wanted}_partial/user_content.pt" if partial else f"user_content_{wanted}")
    random = saved_random_file(folder / f"{wanted}_partial") if partial else None
    return (
        wanted,
        read(content, weights_only=weights_only) if content.is_file() else None,
        None if random is None else read(random),
    )


def _read_states(
    folder: Path, tag: str, *, partial: bool, optimizer: bool, weights_only: bool
) -> tuple[Any, Any]:
    """Read the state dicts of model and optimizer; None for one that was not saved or is not wanted."""
    if partial:
        source = folder / f"{tag}_partial"
        return (
            _load_if_saved(source, "model", weights_only),
            _load_if_saved(source, "optimizer", weights_only) if optimizer else None,
        )
    return (
        _load_file(folder / tag, weights_only),
        _load_file(folder / f"optimizer_{tag}", weights_only) if optimizer else None,
    )


def _load_into_wrapped(model_dict: Any, optimizer_dict: Any, *, strict: bool) -> None:
    """Load state dicts into the script's model and optimizer: either both or nothing."""
    optimizer = None
    if optimizer_dict is not None:
        optimizer = cast("SavedOptimizer", _wrapped(state.optimizer, "smp.DistributedOptimizer"))
        optimizer_dict = optimizer._smp_fitting(optimizer_dict)  # raises before the model is changed
    if model_dict is not None:
        model = cast("ModelState", _wrapped(state.model, "smp.DistributedModel"))
        model.load_state_dict(model_dict, strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_dict)


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


def _require(folder: Path, tag: str, *, partial: bool) -> None:
    full = [name for name in (tag, f"user_content_{tag}", f"optimizer_{tag}") if (folder / name).is_file()]
    if partial and not (folder / f"{tag}_partial").is_dir():
        hint = f"; {full[0]} is of a full one, which partial=False loads" if full else ""
        raise FileNotFoundError(f"there is no partial checkpoint {folder / f'{tag}_partial'}{hint}")
    if not partial and not full:
        hint = (
            f"; {tag}_partial is a partial one, which partial=True loads"
            if (folder / f"{tag}_partial").is_dir()
            else ""
        )
        raise FileNotFoundError(f"there is no full checkpoint {folder / tag}{hint}")


def _load_if_saved(folder: Path, name: str, weights_only: bool) -> Any:
    present = any(file.name.startswith(f"{name}_") for file in folder.iterdir())
    return load(str(folder / name), suffix=".pt", weights_only=weights_only) if present else None


def _load_file(path: Path, weights_only: bool) -> Any:
    return load(str(path), partial=False, weights_only=weights_only) if path.is_file() else None


def _wrapped(found: Wrapped | None, name: str) -> Wrapped:
    if found is None:
        raise SMPCheckpointError(
            f"smp.resume_from_checkpoint: there is nothing to load into; call {name} first"
        )
    return found
