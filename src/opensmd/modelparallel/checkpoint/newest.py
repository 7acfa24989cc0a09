"""The file ``newest`` in a folder of checkpoints: one line of text that names the last complete one.

It is text because scripts read it: ``{tag}_partial``, the folder of a partial checkpoint, or ``{tag}``, the
file of a full one. Earlier versions wrote a torch file with the tag and the kind, which can still be read.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from opensmd.modelparallel.checkpoint.files import commit, read
from opensmd.modelparallel.checkpoint.names import pending_name
from opensmd.modelparallel.checkpoint.seal import is_zip
from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["NEWEST", "read_newest", "write_newest"]

NEWEST = "newest"  # the file's name
_PARTIAL = "_partial"
_LONGEST = 4096  # bytes; anything longer is not a name


def write_newest(folder: Path, tag: str, *, partial: bool) -> None:
    """Name a checkpoint as the newest, atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / NEWEST
    aside = path.with_name(pending_name(path.name, uuid.uuid4().hex))
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(f"{tag}{_PARTIAL if partial else ''}\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    commit(aside, path, alone=True)


def read_newest(folder: Path, *, partial: bool) -> str:
    """Return the tag of the newest checkpoint in a folder.

    Args:
        partial: the kind that is wanted.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        SMPCheckpointError: the file is damaged, or the newest checkpoint is of the other kind.
    """
    path = folder / NEWEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no file {NEWEST!r}, so no checkpoint was completed there; give a tag"
        )
    tag, found = _from_torch(path) if is_zip(path) else _from_text(path)
    if found != partial:
        kinds = {True: "partial", False: "full"}
        raise SMPCheckpointError(
            f"the newest checkpoint in {folder}, {tag!r}, is a {kinds[found]} one, and partial={partial} "
            f"asks for a {kinds[partial]} one. Load it with partial={found}"
            + f", or give the tag of a {kinds[partial]} one"
        )
    return tag


def _from_text(path: Path) -> tuple[str, bool]:
    with path.open("rb") as file:
        content = file.read(_LONGEST)
    try:
        name = content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SMPCheckpointError(f"{path} is damaged: it is not text") from error
    present = {file.name for file in path.parent.iterdir()}
    if not {name, f"user_content_{name}", f"optimizer_{name}"} & present:
        raise SMPCheckpointError(f"{path} is damaged: it names {name[:80]!r}, which is not in the folder")
    partial = name.endswith(_PARTIAL) and (path.parent / name).is_dir()
    return (name.removesuffix(_PARTIAL) if partial else name), partial


def _from_torch(path: Path) -> tuple[str, bool]:
    content = read(path)
    try:
        return str(content["tag"]), bool(content["partial"])
    except (TypeError, KeyError, IndexError) as error:
        raise SMPCheckpointError(f"{path} is not what smp.save_checkpoint writes") from error
