"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: a folder with everything a training needs.

Partial: ``{tag}_partial/`` with ``model_{rank}.pt``, ``optimizer_{rank}.pt`` and ``user_content.pt``. Full:
the model as the file ``{tag}`` and ``user_content_{tag}``. The text file ``newest`` has the name of the last
complete one, ``{tag}_partial`` or ``{tag}``; it is replaced at the very end, so a kill leaves the checkpoint
before it.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opensmd.modelparallel.checkpoint.agreement import together
from opensmd.modelparallel.checkpoint.files import Caller, commit, read, write_aside
from opensmd.modelparallel.checkpoint.newest import read_newest, write_newest
from opensmd.modelparallel.checkpoint.save_load import load, save_part
from opensmd.modelparallel.checkpoint.seal import Label
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["resume_from_checkpoint", "save_checkpoint"]

Entries = Callable[[], dict[str, Any]]


def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: ModelState | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    weights_only: bool = True,
) -> None:
    """Save under ``path``; called on all ranks, after the first step.

    Args:
        path: a folder, made if missing.
        tag: the checkpoint's name, the same on all ranks.
        partial: each rank of the first replica writes its part; False: one file with the whole model, which
            plain PyTorch reads, without the optimizer.
        model, optimizer: what to save; None leaves it out.
        user_content: given back on resuming; tensors, plain values, and what else ``smp.load`` takes without
            trust.
        translate_if_full: give a full checkpoint of a distributed Hugging Face model that library's names.
        num_kept_partial_checkpoints: delete older partial checkpoints beyond so many.
        weights_only: False saves also what loads only with ``weights_only=False``.

    Raises:
        ValueError: nothing to save.
        TypeError: ``model`` is no DistributedModel, or something in the content would not load again.
        SMPCheckpointError: another rank could not write; ``newest`` is as it was.
        OSError: this rank could not write; ``newest`` is as it was.

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
    trust = {"weights_only": weights_only}
    # where replicas share the optimizer's state out, all of them give their slices
    gathered = optimizer.local_state_dict() if partial and optimizer is not None else None
    entries = _entries(model, partial=partial)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if groups.rank_in(CommGroup.RDP_GROUP) != 0:
            return
        if partial:
            _save_partial(folder / f"{tag}_partial", entries, gathered, user_content, trust)
        else:
            _save_full(folder, tag, entries, user_content, trust, translate=translate_if_full)
        if state.rank == 0:
            write_newest(folder, tag, partial=partial)
            if partial and num_kept_partial_checkpoints is not None:
                _prune(folder, num_kept_partial_checkpoints, keep=tag)

    together(
        groups[CommGroup.WORLD], write, failed=f"the checkpoint {tag!r} in {path} was not saved", rank="rank"
    )


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
    """Load what :func:`save_checkpoint` saved into the model and optimizer; called on all ranks.

    May come before the first step, and with another number of partitions.

    Args:
        path: the folder.
        tag: which checkpoint; None takes the newest.
        partial: as it was saved.
        strict: as ``load_state_dict``'s.
        load_optimizer: load the optimizer too, if it was saved (partial only).
        load_sharded_optimizer_state: accepted; saved state is whole, and cut as it is needed here.
        translate_function: applied to the full state dict before loading; None for distributed models' own.
        load_optimizer_states: the name of ``load_optimizer`` in the first version that had this function.
        weights_only: False also loads objects of any type, and runs whatever code is in the files, so it is
            for files of one's own alone.

    Returns:
        The saved ``user_content``, or None.

    Raises:
        FileNotFoundError: no such checkpoint.
        SMPCheckpointError: a file is damaged, or the newest is full and a partial one is asked for, or the
            other way round.
        ValueError: the optimizer's state does not fit; nothing has been changed.
        RuntimeError: the model's does not; nothing has been changed.
    """
    groups = state.require("smp.resume_from_checkpoint").groups
    folder = Path(path)
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states

    def read_content() -> tuple[str, Any]:
        wanted = read_newest(folder, partial=partial) if tag is None else tag
        _require(folder, wanted, partial=partial)
        beside = f"{wanted}_partial/user_content.pt" if partial else f"user_content_{wanted}"
        content = folder / beside
        return wanted, read(content, weights_only=weights_only) if content.is_file() else None

    tag, user_content = together(
        groups[CommGroup.MP_GROUP], read_content, failed=f"nothing of {path} was loaded", rank="mp_rank"
    )
    optimizer_dict = None
    if partial:
        source = folder / f"{tag}_partial"
        model_dict = _load_if_saved(source, "model", weights_only)
        optimizer_dict = _load_if_saved(source, "optimizer", weights_only) if load_optimizer else None
    elif (folder / tag).is_file():
        model_dict = load(str(folder / tag), partial=False, weights_only=weights_only)
    else:
        model_dict = None  # saved without one
    if model_dict is not None and translate_function is not None:
        model_dict = translate_function(model_dict)
    elif model_dict is not None and not partial:
        for _, from_huggingface in state.module_manager.translate_functions:
            model_dict = from_huggingface(model_dict)
    optimizer = None
    if optimizer_dict is not None:
        optimizer = _wrapped(state.optimizer, "smp.DistributedOptimizer")
        optimizer_dict = optimizer._smp_fitting(optimizer_dict)  # refused before the model is changed
    if model_dict is not None:
        _wrapped(state.model, "smp.DistributedModel").load_state_dict(model_dict, strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_dict)
    return user_content


def _entries(model: ModelState | None, *, partial: bool) -> Entries | None:
    """What gives the model's state dict; where replicas share it out, all of them collect it now."""
    if model is None:
        return None

    def collect() -> dict[str, Any]:
        return model.local_state_dict() if partial else model.state_dict(gather_to_rank0=True)

    if not state.cfg.shards_parameters:
        return collect
    collected = collect()
    return lambda: collected


def _require(folder: Path, tag: str, *, partial: bool) -> None:
    full = [name for name in (tag, f"user_content_{tag}") if (folder / name).is_file()]
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


def _save_partial(
    folder: Path,
    entries: Entries | None,
    optimizer: dict[str, Any] | None,
    user_content: Any,
    trust: dict[str, Any],
) -> None:
    def write_content() -> None:
        folder.mkdir(exist_ok=True)
        if state.groups.rank_in(CommGroup.MP_GROUP) == 0 and user_content is not None:
            _write(user_content, folder / "user_content.pt", "user_content", trust)

    _on_the_replica(write_content, folder)
    if entries is not None:
        save_part(
            entries(),
            folder / "model",
            suffix=".pt",
            caller=_caller("the model's state"),
            **trust,
        )
    if optimizer is not None:
        save_part(
            optimizer, folder / "optimizer", suffix=".pt", caller=_caller("the optimizer's state"), **trust
        )


def _save_full(
    folder: Path,
    tag: str,
    entries: Entries | None,
    user_content: Any,
    trust: dict[str, Any],
    *,
    translate: bool,
) -> None:
    whole = entries() if entries is not None else None
    if translate and whole:
        for to_huggingface, _ in state.module_manager.translate_functions:
            whole = to_huggingface(whole)

    def write() -> None:
        if state.groups.rank_in(CommGroup.MP_GROUP) != 0:
            return
        if user_content is not None:
            _write(user_content, folder / f"user_content_{tag}", "user_content", trust)
        if whole is not None:
            _write(whole, folder / tag, "the model's state", trust)

    _on_the_replica(write, folder / tag)


def _on_the_replica(work: Callable[[], None], path: Path) -> None:
    """Work of the first rank that all ranks of the replica know the outcome of, before they go on."""
    together(state.groups[CommGroup.MP_GROUP], work, failed=f"{path} was not saved", rank="mp_rank")


def _write(obj: Any, path: Path, content: str, trust: dict[str, Any]) -> None:
    label = Label(save=uuid.uuid4().hex, part=0, parts=1)
    commit(write_aside(obj, path, label, caller=_caller(content), **trust), path, alone=True)


def _caller(content: str) -> Caller:
    return Caller(save="smp.save_checkpoint", load="smp.resume_from_checkpoint", content=content)


def _load_if_saved(folder: Path, name: str, weights_only: bool) -> Any:
    present = any(file.name.startswith(f"{name}_") for file in folder.iterdir())
    return load(str(folder / name), suffix=".pt", weights_only=weights_only) if present else None


def _prune(folder: Path, kept: int, *, keep: str) -> None:
    partials = [
        path for path in folder.glob("[!.]*_partial") if path.is_dir() and path.name != f"{keep}_partial"
    ]
    partials.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in partials[max(0, kept - 1) :]:
        removed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.removed")
        path.replace(removed)  # so that a kill leaves no half of it under its name
    for removed in folder.glob(".*_partial.*.removed"):
        shutil.rmtree(removed)


def _wrapped(found: Any, name: str) -> Any:
    if found is None:
        raise SMPCheckpointError(
            f"smp.resume_from_checkpoint: there is nothing to load into; call {name} first"
        )
    return found
