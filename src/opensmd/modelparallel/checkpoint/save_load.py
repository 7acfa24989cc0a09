"""``smp.save`` and ``smp.load``.

A partial save is two steps, so that a kill at any moment leaves a checkpoint that loads:

1. every rank of the replica writes its file under a temporary name and waits for the others;
2. every rank renames its file.

A kill in step 1 leaves the previous checkpoint. A kill in step 2 leaves some files of the new save renamed
and the others complete under their temporary names, where loading finds them.
"""

from __future__ import annotations

import pickle
import time
import uuid
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensmd.modelparallel.checkpoint.agreement import meet_for_files, naming_lost_ranks, together
from opensmd.modelparallel.checkpoint.files import PROTOCOL, Caller, commit, read, write_aside
from opensmd.modelparallel.checkpoint.names import partial_name, pending_name
from opensmd.modelparallel.checkpoint.part_files import PartFiles, complete_set, missing_text
from opensmd.modelparallel.checkpoint.seal import Label
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.groups import Groups
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.merge import merge_trees
from opensmd.script_level import script_level

__all__ = ["load", "load_whole", "read_parts", "save", "save_part"]


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = PROTOCOL,
    *,
    v3: bool = False,
    suffix: str = "",
    weights_only: bool | None = None,
) -> None:
    """Save an object like ``torch.save``, but replace an older file only when the new one is complete.

    Args:
        obj: tensors, plain values, and whatever else :func:`load` accepts without trust; with
            ``weights_only=False``, anything picklable.
        f: file name.
        partial: each rank of the replica writes ``f_{mp_rank}`` (``f_{pp_rank}_{tp_rank}`` with tensor
            parallelism), so all of them must call (those with ``dp_rank() == 0`` are enough). False: the
            caller writes the one file ``f``, which plain ``torch.load`` reads.
        pickle_module, pickle_protocol: as in torch.save; files that load without trust always have protocol
            2.
        v3: use three numbers in the name, the last of which is ``rdp_rank()``, so that every replica can save
            what only it has: its slices of sharded optimizer state.
        suffix: follows the numbers, such as ".pt".
        weights_only: False also saves what loads only with ``weights_only=False``, and is the default if
            another ``pickle_module`` than pickle is given; the default True refuses it.

    Raises:
        TypeError: ``f`` is not a string, or something in ``obj`` would not load again.
        SMPCheckpointError: another rank of the replica could not write; nothing has been replaced.
        SMPError: ``partial`` inside a step of a split model.
        OSError: this rank could not write; nothing has been replaced.

    Warns:
        UserWarning: a ``pickle_protocol`` that does not load without trust; 2 is used instead.
    """
    path = _checked(f, "smp.save")
    if weights_only is None:
        weights_only = pickle_module is pickle
    if weights_only and pickle_protocol != PROTOCOL:
        warnings.warn(
            f"smp.save: pickle_protocol={pickle_protocol} is not used: files that smp.load and torch.load "
            f"take without trust have protocol {PROTOCOL}. Give weights_only=False to smp.save and smp.load "
            "to keep it",
            stacklevel=script_level(),
        )
        pickle_protocol = PROTOCOL
    options = {
        "pickle_module": pickle_module,
        "pickle_protocol": pickle_protocol,
        "weights_only": weights_only,
        "caller": Caller(),
    }
    if not partial:
        if path.is_symlink():
            path = path.resolve()  # as torch.save writes through links
        aside = write_aside(obj, path, Label(save=uuid.uuid4().hex, part=0, parts=1), **options)
        commit(aside, path, alone=False)  # other ranks may be writing the same name
        return
    meet_for_files("smp.save(partial=True)", failed=f"{path} was not saved")
    save_part(obj, path, v3=v3, suffix=suffix, **options)


def save_part(
    obj: Any,
    f: Path,
    *,
    v3: bool = False,
    suffix: str = "",
    group: dist.ProcessGroup | None = None,
    before_commit: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    """Write this rank's part of a partial checkpoint; all ranks of the replica must call.

    Args:
        group: these ranks; None for the group that all other uses share.
        before_commit: called when this rank's file is written; raising here cancels the save.
        options: those of ``files.write_aside``.
    """
    groups = state.require("smp.save(partial=True)").groups
    group, part = group or groups[CommGroup.MP_GROUP], _own_part(groups)
    path = f.with_name(
        partial_name(
            f.name,
            pp_rank=groups.rank_in(CommGroup.PP_GROUP),
            tp_rank=groups.rank_in(CommGroup.TP_GROUP) if groups.grid.tensor > 1 else None,
            rdp_rank=groups.rank_in(CommGroup.RDP_GROUP) if v3 else None,
            suffix=suffix,
        )
    )
    with naming_lost_ranks(f"{f} was not saved"):
        save = str(exchange(_new_save(), group)[0])  # the same on all ranks
    label = Label(save=save, part=part, parts=dist.get_world_size(group))

    def write() -> Path:
        aside = write_aside(obj, path, label, **options)
        if before_commit is not None:
            before_commit()
        return aside

    try:
        aside = together(
            group,
            write,
            failed=f"{f} was not saved, the previous checkpoint is untouched",
            rank="mp_rank",
        )
    except Exception:
        path.with_name(pending_name(path.name, save)).unlink(missing_ok=True)
        raise
    together(
        group,
        lambda: commit(aside, path, alone=True),
        failed=f"{f} was written, but its parts did not all get their names, which loading finds",
        rank="mp_rank",
    )


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

    From a partial checkpoint of the current degrees, each rank gets its own part, including what every
    replica saved with ``v3=True``. From other degrees, each rank reads all parts and gets full state dicts.
    Files are verified before anything is returned. If one rank of the replica cannot read its file, all of
    them raise.

    Args:
        f: file name without the ranks' numbers; all ranks must call.
        map_location, pickle_module, pickle_load_args: as in torch.load.
        partial: read ``f_{mp_rank}``; False: read ``f``.
        weights_only: as in torch.load. The default True (False if a ``pickle_module`` is given) allows only
            tensors, plain values and a list of harmless types: NumPy's scalars and arrays, paths, times,
            results of argparse, configurations of transformers. False runs whatever code is in the file, so
            use it only for your own files.
        back_compat: accepted; older names are always found.
        suffix: what follows the ranks' numbers.

    Raises:
        TypeError: ``f`` is not a string, or a keyword is unknown.
        FileNotFoundError: nothing of that name; the message says what there is.
        SMPCheckpointError: a file is damaged, foreign, missing from its set, or not to be trusted.
        SMPError: ``partial`` inside a step of a split model.
    """
    path = _checked(f, "smp.load")
    trusted = weights_only is False or (weights_only is None and pickle_module is not None)
    if pickle_module is None:
        _require_known(pickle_load_args)
    options = {"map_location": map_location, "weights_only": not trusted, **pickle_load_args}
    if pickle_module is not None:
        options["pickle_module"] = pickle_module
    if not partial:
        if not path.is_file():
            raise FileNotFoundError(missing_text(path, partial=False))
        return read(path, **options)
    groups = state.require("smp.load(partial=True)").groups
    meet_for_files("smp.load(partial=True)", failed=f"{f} was not loaded")
    group = groups[CommGroup.MP_GROUP]

    def load_own() -> Any:
        files = complete_set(path, suffix, replica=groups.rank_in(CommGroup.RDP_GROUP))
        if (len(files.paths), files.tensor) == (dist.get_world_size(group), groups.grid.tensor):
            return read(files.paths[_own_part(groups)], **options)
        return _merged(files, options)

    return together(
        group,
        load_own,
        failed=f"{f} was not loaded, because another rank could not read it",
        rank="mp_rank",
    )


def load_whole(f: str, *, suffix: str = "") -> Any:
    """Merge all parts of a partial checkpoint, in one process without ``smp.init``.

    Raises:
        FileNotFoundError: nothing of that name; the message says what there is.
        SMPCheckpointError: a file is damaged, foreign, missing from its set, or not to be trusted.
    """
    parts, tensor = read_parts(f, suffix=suffix)
    return merge_trees(parts, tensor=tensor)


def read_parts(f: str, *, suffix: str = "") -> tuple[list[Any], int]:
    """Read all parts of a partial checkpoint in order, and how many ranks shared each tensor, in one process.

    Tensors stay in the files until they are read.

    Raises:
        FileNotFoundError: nothing of that name; the message says what there is.
        SMPCheckpointError: a file is damaged, foreign, missing from its set, or not to be trusted.
    """
    files = complete_set(_checked(f, "a partial checkpoint"), suffix)
    return [read(path, mmap=True) for path in files.paths], files.tensor


def _require_known(given: Collection[str]) -> None:
    unknown = sorted(set(given) - {"mmap", "encoding", "errors", "fix_imports", "buffers"})  # Unpickler's
    if unknown:
        raise TypeError(
            f"smp.load takes no {', '.join(unknown)}: besides its own arguments it takes torch.load's. Give "
            "f as to smp.save, and suffix if that was given one; all else (v3 among it) the files say"
        )


def _own_part(groups: Groups) -> int:
    """Return the index of this rank's part: parts are ordered by pp_rank, then by tp_rank."""
    return groups.rank_in(CommGroup.PP_GROUP) * groups.grid.tensor + groups.rank_in(CommGroup.TP_GROUP)


def _merged(files: PartFiles, options: dict[str, Any]) -> Any:
    """Merge all parts; tensors that need no merging stay in the files until they are read."""
    parts = [read(path, **{"mmap": True, **options}) for path in files.paths]
    return merge_trees(parts, tensor=files.tensor)


def _new_save() -> str:
    """Return a unique name for a save; later names sort after earlier ones, and after all older forms."""
    return f"t{time.time_ns():016x}{uuid.uuid4().hex[:15]}"


def _checked(f: object, name: str) -> Path:
    if not isinstance(f, str):
        raise TypeError(f"{name}: f={f!r} must be a file name (str), because ranks add their numbers to it")
    return Path(f)
