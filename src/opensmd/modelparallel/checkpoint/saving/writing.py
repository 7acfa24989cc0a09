"""Writing a snapshot into its folder, so ordered that a kill at any moment leaves a whole checkpoint."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensmd.modelparallel.checkpoint.agreement import together
from opensmd.modelparallel.checkpoint.files import Caller, commit, write_aside
from opensmd.modelparallel.checkpoint.newest import write_newest
from opensmd.modelparallel.checkpoint.save_load import save_part
from opensmd.modelparallel.checkpoint.saving.collecting import Collecting, send_pieces
from opensmd.modelparallel.checkpoint.saving.random_states import random_file
from opensmd.modelparallel.checkpoint.saving.snapshot import Snapshot
from opensmd.modelparallel.checkpoint.seal import Label
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["SavingGroups", "write_snapshot"]

_PART = re.compile(r"\.?(user_content|(model|optimizer|random)(_\d+)+)\.pt(\.[0-9a-zA-Z]+\.new)?")


@dataclass(frozen=True, kw_only=True)
class SavingGroups:
    """What ranks agree through while they write.

    Attributes:
        world: all ranks.
        replica: this rank's replica.
        shards: the ranks that have pieces of what the first of them writes.
    """

    world: dist.ProcessGroup
    replica: dist.ProcessGroup
    shards: dist.ProcessGroup


def write_snapshot(snapshot: Snapshot, groups: SavingGroups) -> None:
    """Write this rank's part and wait for the others; all ranks must call.

    Raises:
        SMPCheckpointError: another rank could not write; ``newest`` is unchanged.
        OSError: this rank could not write; ``newest`` is unchanged.
        TypeError: something in the content would not load again.
    """

    def prepare() -> None:
        folder, tag = snapshot.folder, snapshot.tag
        snapshot.rest()
        snapshot.require_untouched()
        snapshot.rest()
        folder.mkdir(parents=True, exist_ok=True)
        if snapshot.random is not None:
            own = folder / f"{tag}_partial"
            own.mkdir(exist_ok=True)
            _write(snapshot.random, random_file(own), "the random states", snapshot)

    def write() -> None:
        if state.groups.rank_in(CommGroup.RDP_GROUP) == 0:
            (_write_partial if snapshot.partial else _write_full)(snapshot, groups)
        elif snapshot.partial:
            send_pieces([snapshot.model, snapshot.optimizer], groups.shards)

    def finish() -> None:
        if state.rank == 0:
            write_newest(snapshot.folder, snapshot.tag, partial=snapshot.partial)
            if snapshot.partial and snapshot.kept is not None:
                _prune(snapshot.folder, snapshot.kept, keep=snapshot.tag)

    failed = f"the checkpoint {snapshot.tag!r} in {snapshot.folder} was not saved"
    together(groups.world, prepare, failed=failed, rank="rank")
    together(groups.world, write, failed=failed, rank="rank")
    together(groups.world, finish, failed=failed, rank="rank")


def _write_partial(snapshot: Snapshot, groups: SavingGroups) -> None:
    folder = snapshot.folder / f"{snapshot.tag}_partial"

    def write_content() -> None:
        folder.mkdir(exist_ok=True)
        if state.groups.rank_in(CommGroup.MP_GROUP) == 0 and snapshot.user_content is not None:
            _write(snapshot.user_content, folder / "user_content.pt", "user_content", snapshot)

    collecting = Collecting([snapshot.model, snapshot.optimizer], groups.shards)
    try:
        _on_the_replica(write_content, folder, groups)
        _write_parts(folder, snapshot, groups, collecting)
    finally:
        collecting.receive_rest()


def _write_parts(folder: Path, snapshot: Snapshot, groups: SavingGroups, collecting: Collecting) -> None:
    for name, own in (("model", snapshot.model), ("optimizer", snapshot.optimizer)):
        if own is not None:
            snapshot.rest()
            save_part(
                collecting.in_turn(own),
                folder / name,
                suffix=".pt",
                group=groups.replica,
                before_commit=snapshot.require_untouched,
                caller=_caller(f"the {name}'s state"),
                weights_only=snapshot.weights_only,
                between=snapshot.between,
            )


def _write_full(snapshot: Snapshot, groups: SavingGroups) -> None:
    folder, tag = snapshot.folder, snapshot.tag

    def write() -> None:
        if state.groups.rank_in(CommGroup.MP_GROUP) != 0:
            return
        if snapshot.user_content is not None:
            _write(snapshot.user_content, folder / f"user_content_{tag}", "user_content", snapshot)
        if snapshot.optimizer is not None:
            _write(snapshot.optimizer, folder / f"optimizer_{tag}", "the optimizer's state", snapshot)
        if snapshot.model is not None:
            _write(snapshot.model, folder / tag, "the model's state", snapshot)

    _on_the_replica(write, folder / tag, groups)


def _on_the_replica(work: Callable[[], None], path: Path, groups: SavingGroups) -> None:
    """Run ``work`` on the first rank; all ranks of the replica learn its outcome before they continue."""
    together(groups.replica, work, failed=f"{path} was not saved", rank="mp_rank")


def _write(obj: Any, path: Path, content: str, snapshot: Snapshot) -> None:
    label = Label(save=uuid.uuid4().hex, part=0, parts=1)
    aside = write_aside(
        obj,
        path,
        label,
        caller=_caller(content),
        weights_only=snapshot.weights_only,
        between=snapshot.between,
    )
    snapshot.require_untouched()
    commit(aside, path, alone=True)


def _caller(content: str) -> Caller:
    return Caller(save="smp.save_checkpoint", load="smp.resume_from_checkpoint", content=content)


def _prune(folder: Path, kept: int, *, keep: str) -> None:
    partials = [
        path for path in folder.glob("[!.]*_partial") if path.name != f"{keep}_partial" and _is_partial(path)
    ]
    partials.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in partials[max(0, kept - 1) :]:
        removed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.removed")
        path.replace(removed)  # so that a kill cannot leave half of it under its name
    for removed in folder.glob(".*_partial.*.removed"):
        shutil.rmtree(removed)


def _is_partial(folder: Path) -> bool:
    """Whether a save, completed or killed, has written there; it may be a folder of the user's."""
    return folder.is_dir() and any(_PART.fullmatch(file.name) for file in folder.iterdir())
