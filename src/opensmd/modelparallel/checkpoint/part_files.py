"""Which files make up a partial checkpoint: those of the newest save that has all of its parts.

A save that was killed while renaming its files has left some under temporary names (see ``save_load``), so
these files count, too::

    f_0           part 0 of save 8, which has its name
    f_1           part 1 of save 7, which save 8 was about to replace
    .f_1.8.new    part 1 of save 8, not renamed yet     ──►  save 8 is whole: f_0 and .f_1.8.new
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opensmd.modelparallel.checkpoint.names import PartName, parts_of, ranks_sharing
from opensmd.modelparallel.checkpoint.seal import read_label
from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["PartFiles", "complete_set", "missing_text"]


@dataclass(frozen=True, kw_only=True)
class PartFiles:
    """The files of one save, in order.

    Attributes:
        tensor: how many ranks shared each tensor.
    """

    paths: list[Path]
    tensor: int


def complete_set(path: Path, suffix: str, *, replica: int = 0) -> PartFiles:
    """Return the files of the newest complete save, including those that a kill left under temporary names.

    Raises:
        FileNotFoundError: there are no files of this name.
        SMPCheckpointError: no save is complete.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    names = parts_of(path.name, _names_in(path.parent), suffix=suffix, replica=replica)
    found = [name for name in names if name.save is None]
    if not any(name.stage == name.tensor == 0 for name in found):
        raise FileNotFoundError(missing_text(path, partial=True))
    labels = {name: read_label(path.with_name(name.file)) for name in found}
    saves = {(label.save, label.parts) for label in labels.values() if label is not None}
    if not saves:
        return _foreign_set(path, found)
    tried = []
    for save, parts in sorted(saves, reverse=True):
        named = {
            label.part: name
            for name, label in labels.items()
            if label is not None and (label.save, label.parts) == (save, parts)
        }
        files, tensor = _with_waiting(named, [name for name in names if name.save == save])
        if len(files) >= parts and all(part in files for part in range(parts)):
            return PartFiles(paths=[path.with_name(files[part].file) for part in range(parts)], tensor=tensor)
        absent = [part for part in range(min(parts, len(files) + 10)) if part not in files][:10]
        tried.append(
            f"parts {absent}{' and more' if len(files) + len(absent) < parts else ''} of {parts} are missing "
            f"from the save {save[-8:]}"
        )
    raise SMPCheckpointError(f"{path}: the files are not of one save: {'; '.join(tried)}")


def _with_waiting(named: dict[int, PartName], waiting: Sequence[PartName]) -> tuple[dict[int, PartName], int]:
    """Return the files of a save by part, renamed or not, and how many ranks shared tensors."""
    tensor = ranks_sharing([*named.values(), *waiting])
    return {**{name.stage * tensor + name.tensor: name for name in waiting}, **named}, tensor


def _foreign_set(path: Path, found: Sequence[PartName]) -> PartFiles:
    """Return the files of another library, which only their names show to belong together."""
    numbers = min(name.numbers for name in found)
    names = [name for name in found if name.numbers == numbers]
    names.sort(key=lambda name: (name.stage, name.tensor))
    return PartFiles(paths=[path.with_name(name.file) for name in names], tensor=ranks_sharing(names))


def missing_text(path: Path, *, partial: bool) -> str:
    """Say that there is no checkpoint of this name, and what there is instead."""
    present = _names_in(path.parent) if path.parent.is_dir() else []
    like = [name for name in present if name.startswith(path.name)]
    folder = f"The folder {path.parent} has {', '.join(present[:10]) or 'no files'}"
    parts = [name.file for name in parts_of(path.name, present) if name.save is None]
    text = f"there is no {'partial ' if partial else ''}checkpoint {path}"
    if partial and path.name in like:
        return f"{text}_0, but a full one, {path}: load it with partial=False"
    if not partial and parts:
        return f"{text}, but a partial one, {', '.join(parts)}: load it with partial=True"
    return f"{text}{'_0' if partial else ''}. {folder}"


def _names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())
