"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: a folder with everything a training needs.

Partial: ``{tag}_partial/`` with ``model_{rank}.pt``, ``optimizer_{rank}.pt`` and ``user_content.pt``. Full:
the model as the file ``{tag}`` and ``user_content_{tag}``. The file ``newest`` names the last complete one;
it is replaced at the very end, so a kill leaves the checkpoint before it.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensmd.modelparallel.checkpoint.files import Label, commit, read, write_aside
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.model_state import ModelState
from opensmd.modelparallel.ranks import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["resume_from_checkpoint", "save_checkpoint"]


def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: ModelState | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save under ``path``; called on all ranks, after the first step.

    Args:
        path: a folder, made if missing.
        tag: the checkpoint's name, the same on all ranks.
        partial: each rank of the first replica writes its part; False: one file with the whole model, which
            plain PyTorch reads, without the optimizer.
        model, optimizer: what to save; None leaves it out.
        user_content: anything of tensors and plain values, given back on resuming.
        translate_if_full: accepted; names are always the plain model's.
        num_kept_partial_checkpoints: delete older partial checkpoints beyond so many.

    Raises:
        ValueError: nothing to save.
        TypeError: ``model`` is no DistributedModel.

    Warns:
        UserWarning: a full checkpoint is asked for with an optimizer, which it has no place for.
    """
    groups = state.require("smp.save_checkpoint").groups
    if model is not None and not isinstance(model, ModelState):
        raise TypeError(
            f"smp.save_checkpoint: expected a smp.DistributedModel, got {type(model).__name__}; save others "
            "with torch.save"
        )
    if model is None and user_content is None and (optimizer is None or not partial):
        raise ValueError(
            "smp.save_checkpoint: nothing to save; give model, user_content or, with partial=True, optimizer"
        )
    if not partial and optimizer is not None and state.rank == 0:
        warnings.warn(
            "smp.save_checkpoint: a full checkpoint holds the model alone, so the optimizer is not saved. "
            "Use partial=True, or smp.save(optimizer.state_dict(), ..., partial=False)",
            stacklevel=2,
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if groups.rank_in(CommGroup.DP_GROUP) == 0:
        if partial:
            _save_partial(folder / f"{tag}_partial", model, optimizer, user_content)
        else:
            _save_full(folder, tag, model, user_content)
        if state.rank == 0:
            newest = {"tag": tag, "partial": partial}
            _write(newest, folder / "newest")
            if partial and num_kept_partial_checkpoints is not None:
                _prune(folder, num_kept_partial_checkpoints, keep=tag)
    dist.barrier(group=groups[CommGroup.WORLD])


def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
    load_optimizer_states: bool | None = None,
) -> Any:
    """Load what :func:`save_checkpoint` saved into the model and optimizer; called on all ranks.

    May come before the first step, and with another number of partitions.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest.
        partial: as it was saved; with ``tag=None`` the newest knows.
        strict: as ``load_state_dict``'s.
        load_optimizer: load the optimizer too, if it was saved (partial only).
        load_sharded_optimizer_state: accepted; optimizer state is never sharded here.
        translate_function: applied to the full state dict before loading.
        load_optimizer_states: the name of ``load_optimizer`` in the first version that had this function.

    Returns:
        The saved ``user_content``, or None.

    Raises:
        FileNotFoundError: no such checkpoint.
        SMPCheckpointError: a file is damaged.
    """
    state.require("smp.resume_from_checkpoint")
    folder = Path(path)
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    if tag is None:
        tag, partial = _newest(folder)
    source = folder / f"{tag}_partial"
    if partial:
        if not source.is_dir():
            raise FileNotFoundError(
                f"there is no partial checkpoint {source}; is it a full one (partial=False)?"
            )
        model_dict = _load_if_saved(source, "model")
        optimizer_dict = _load_if_saved(source, "optimizer") if load_optimizer else None
        content = source / "user_content.pt"
    else:
        model_dict = load(str(folder / tag), partial=False)
        optimizer_dict = None
        content = folder / f"user_content_{tag}"
    user_content = read(content, weights_only=True) if content.is_file() else None
    if translate_function is not None and model_dict is not None:
        model_dict = translate_function(model_dict)
    if model_dict is not None:
        _wrapped(state.model, "smp.DistributedModel").load_state_dict(model_dict, strict=strict)
    if optimizer_dict is not None:
        _wrapped(state.optimizer, "smp.DistributedOptimizer").load_state_dict(optimizer_dict)
    return user_content


def _save_partial(folder: Path, model: ModelState | None, optimizer: Any, user_content: Any) -> None:
    folder.mkdir(exist_ok=True)
    if model is not None:
        save(model.local_state_dict(), str(folder / "model"), partial=True, suffix=".pt")
    if optimizer is not None:
        save(optimizer.local_state_dict(), str(folder / "optimizer"), partial=True, suffix=".pt")
    if state.groups.rank_in(CommGroup.MP_GROUP) == 0 and user_content is not None:
        _write(user_content, folder / "user_content.pt")


def _save_full(folder: Path, tag: str, model: ModelState | None, user_content: Any) -> None:
    whole = model.state_dict(gather_to_rank0=True) if model is not None else None
    if state.groups.rank_in(CommGroup.MP_GROUP) != 0:
        return
    if whole is not None:
        _write(whole, folder / tag)
    if user_content is not None:
        _write(user_content, folder / f"user_content_{tag}")


def _write(obj: Any, path: Path) -> None:
    commit(write_aside(obj, path, Label(save=uuid.uuid4().hex, part=0, parts=1)), path)


def _load_if_saved(folder: Path, name: str) -> Any:
    present = any(each.name.startswith(f"{name}_") for each in folder.iterdir())
    return load(str(folder / name), partial=True, suffix=".pt") if present else None


def _newest(folder: Path) -> tuple[str, bool]:
    if not (folder / "newest").is_file():
        raise FileNotFoundError(
            f"{folder} has no file 'newest', so no checkpoint was completed there; give a tag"
        )
    found = read(folder / "newest", weights_only=True)
    try:
        return found["tag"], found["partial"]
    except (TypeError, KeyError) as error:
        raise SMPCheckpointError(f"{folder / 'newest'} is not what smp.save_checkpoint writes") from error


def _prune(folder: Path, kept: int, *, keep: str) -> None:
    partials = [each for each in folder.glob("*_partial") if each.is_dir() and each.name != f"{keep}_partial"]
    partials.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    for each in partials[max(0, kept - 1) :]:
        shutil.rmtree(each)


def _wrapped(found: Any, name: str) -> Any:
    if found is None:
        raise SMPCheckpointError(
            f"smp.resume_from_checkpoint: there is nothing to load into; call {name} first"
        )
    return found
