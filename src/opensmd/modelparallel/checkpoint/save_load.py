"""``smp.save`` and ``smp.load``.

A partial save is two steps, so that a kill at any moment leaves a checkpoint that loads:

1. every rank of the replica writes its file aside and waits for the others;
2. every rank renames its file.

A kill in step 1 leaves the previous checkpoint. A kill in step 2 leaves some files of the new save renamed
and the others complete beside their names: loading finds them there.
"""

from __future__ import annotations

import itertools
import pickle
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensmd.modelparallel.checkpoint.files import Label, commit, pending_name, read, read_label, write_aside
from opensmd.modelparallel.checkpoint.merge import merge_trees
from opensmd.modelparallel.checkpoint.names import partial_name, parts_of
from opensmd.modelparallel.exceptions import PeerCheckpointError, SMPCheckpointError
from opensmd.modelparallel.ranks import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["load", "save"]


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    v3: bool = False,
    suffix: str = "",
) -> None:
    """Save an object like ``torch.save``, replacing an older file only when the new one is complete.

    Args:
        obj: anything picklable; tensors and plain values load without trust.
        f: file name.
        partial: each rank of the replica writes ``f_{mp_rank}``, so all of them must call it (those with
            ``dp_rank() == 0`` are enough). False: the caller writes the one file ``f``, which plain
            ``torch.load`` reads.
        pickle_module, pickle_protocol: as torch.save's.
        v3: three numbers in the name, as later versions had with sharded optimizer state.
        suffix: goes behind the numbers, such as ".pt".

    Raises:
        TypeError: ``f`` is not a string.
        SMPCheckpointError: another rank of the replica could not write; nothing has been replaced.
        OSError: this rank could not write; nothing has been replaced.
    """
    path = _checked(f, "smp.save")
    options = {"pickle_module": pickle_module, "pickle_protocol": pickle_protocol}
    if not partial:
        commit(write_aside(obj, path, Label(save=uuid.uuid4().hex, part=0, parts=1), **options), path)
        return
    groups = state.require("smp.save(partial=True)").groups
    group, part = groups[CommGroup.MP_GROUP], groups.rank_in(CommGroup.MP_GROUP)
    rdp_rank = groups.rank_in(CommGroup.RDP_GROUP) if v3 else None
    path = Path(partial_name(f, mp_rank=part, rdp_rank=rdp_rank, suffix=suffix))
    label = Label(save=_agree(group), part=part, parts=dist.get_world_size(group))
    aside, failure = None, None
    try:
        aside = write_aside(obj, path, label, **options)
    except Exception as error:
        failure = error
    failures = _exchange(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if any(failures):
        if aside is not None:
            aside.unlink(missing_ok=True)
        if failure is not None:
            raise failure
        raise PeerCheckpointError(
            f"{f} was not saved, the previous checkpoint is untouched: {_by_rank(failures)}"
        )
    assert aside is not None
    commit(aside, path)
    dist.barrier(group=group)
    for leftover in path.parent.glob(f".{path.name}.*.new"):
        leftover.unlink(missing_ok=True)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    *,
    weights_only: bool | None = None,
    back_compat: bool = False,
    suffix: str = "",
    **pickle_load_args: Any,
) -> Any:
    """Load what :func:`save` or, with ``partial=False``, plain ``torch.save`` wrote.

    A partial checkpoint of as many partitions as now gives each rank its own part. From another number of
    partitions each rank reads all parts and gets full state dicts. Files are verified before anything is
    returned, and if one rank of the replica cannot read its file, all of them raise.

    Args:
        f: file name, without the ranks' numbers; called on all ranks.
        map_location, pickle_module, pickle_load_args: as torch.load's.
        partial: read ``f_{mp_rank}``; False: read ``f``.
        weights_only: as torch.load's; the default True allows tensors and plain values only (False if a
            ``pickle_module`` is given).
        back_compat: accepted; older names are always found.
        suffix: what is behind the ranks' numbers.

    Raises:
        TypeError: ``f`` is not a string.
        FileNotFoundError: nothing of that name; the message says what there is.
        SMPCheckpointError: a file is damaged, foreign, missing from its set, or not to be trusted.
    """
    path = _checked(f, "smp.load")
    trusted = weights_only is False or (weights_only is None and pickle_module is not None)
    options = {"map_location": map_location, "weights_only": not trusted, **pickle_load_args}
    if pickle_module is not None:
        options["pickle_module"] = pickle_module
    if not partial:
        if not path.is_file():
            raise FileNotFoundError(_missing(path, partial=False))
        return read(path, **options)
    groups = state.require("smp.load(partial=True)").groups
    group = groups[CommGroup.MP_GROUP]
    loaded, failure = None, None
    try:
        files = _complete_set(path, suffix)
        loaded = _load_parts(files, groups.rank_in(CommGroup.MP_GROUP), dist.get_world_size(group), options)
    except Exception as error:
        failure = error
    failures = _exchange(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    if any(failures):
        raise PeerCheckpointError(
            f"{f} was not loaded, because another rank could not read it: {_by_rank(failures)}"
        )
    return loaded


def _load_parts(files: list[Path], part: int, parts: int, options: dict[str, Any]) -> Any:
    """This rank's part if there are as many as ranks, all parts put together otherwise."""
    if len(files) == parts:
        return read(files[part], **options)
    return merge_trees([read(each, **options) for each in files])


def _complete_set(path: Path, suffix: str) -> list[Path]:
    """The files of one save, in order; a save that was killed while renaming is taken from where it waits."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    found = [path.with_name(name) for name in parts_of(path.name, _names_in(path.parent), suffix=suffix)]
    if not found:
        raise FileNotFoundError(_missing(path, partial=True))
    labels = [read_label(each) for each in found]
    if all(label is None for label in labels):
        return found  # another library wrote them: nothing tells whether they belong together
    tried = []
    for save in dict.fromkeys(label.save for label in labels if label is not None):
        label = next(each for each in labels if each is not None and each.save == save)
        files = [_of_save(found, labels, save, part, path, suffix) for part in range(label.parts)]
        if None not in files:
            return [each for each in files if each is not None]
        absent = [part for part, each in enumerate(files) if each is None]
        tried.append(f"parts {absent} of {label.parts} are missing from the save {save[:8]}")
    raise SMPCheckpointError(f"{path}: the files are not of one save: {'; '.join(tried)}")


def _of_save(
    found: list[Path], labels: list[Label | None], save: str, part: int, path: Path, suffix: str
) -> Path | None:
    """One part of a save: under its name, or complete and waiting to be renamed."""
    for each, label in zip(found, labels, strict=True):
        if label is not None and label.save == save and label.part == part:
            return each
    waiting = (
        path.with_name(partial_name(path.name, mp_rank=part, rdp_rank=rdp, suffix=suffix))
        for rdp in (None, 0)
    )
    return next((each for each in (pending_name(name, save) for name in waiting) if each.is_file()), None)


def _missing(path: Path, *, partial: bool) -> str:
    present = _names_in(path.parent) if path.parent.is_dir() else []
    like = [name for name in present if name.startswith(path.name)]
    folder = f"The folder {path.parent} has {', '.join(present[:10]) or 'no files'}"
    parts = parts_of(path.name, present)
    text = f"there is no {'partial ' if partial else ''}checkpoint {path}"
    if partial and path.name in like:
        return f"{text}_0, but a full one, {path}: load it with partial=False"
    if not partial and parts:
        return f"{text}, but a partial one, {', '.join(parts)}: load it with partial=True"
    return f"{text}{'_0' if partial else ''}. {folder}"


def _names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _checked(f: object, name: str) -> Path:
    if not isinstance(f, str):
        raise TypeError(f"{name}: f={f!r} must be a file name (str), because ranks add their numbers to it")
    return Path(f)


def _agree(group: dist.ProcessGroup) -> str:
    """A new name for this save, the same on all ranks of the group."""
    return str(_exchange(uuid.uuid4().hex, group)[0])


def _by_rank(failures: list[Any]) -> str:
    """The failures that there are, with the ranks they are of."""
    return "; ".join(f"mp_rank {rank}: {text}" for rank, text in enumerate(failures) if text)


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = list(itertools.repeat(None, dist.get_world_size(group)))
    dist.all_gather_object(values, value, group=group)
    return values
