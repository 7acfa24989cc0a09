"""``smp.resume_from_checkpoint``: loads the folder that ``smp.save_checkpoint`` has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from opensmd.modelparallel.checkpoint.agreement import meet_for_files, together
from opensmd.modelparallel.checkpoint.files import read
from opensmd.modelparallel.checkpoint.newest import read_newest
from opensmd.modelparallel.checkpoint.save_load import load
from opensmd.modelparallel.checkpoint.saved_optimizer import SavedOptimizer
from opensmd.modelparallel.checkpoint.saving.background import finish_background_save
from opensmd.modelparallel.checkpoint.saving.random_states import saved_random_file, set_random_states
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from opensmd.modelparallel.tensor_parallel.huggingface.originals import as_distributed

__all__ = ["resume_from_checkpoint"]

Wrapped = TypeVar("Wrapped")


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
    """Load what ``smp.save_checkpoint`` saved into the model and optimizer; all ranks must call.

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
    meet_for_files("smp.resume_from_checkpoint", failed=f"nothing of {path} was loaded")
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
