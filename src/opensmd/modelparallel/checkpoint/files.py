"""Files that survive a kill: written aside, flushed to disk, then renamed; verified when read.

A file is torch's own zip format, so plain ``torch.load`` reads it, with one more record that says what it is
part of. The zip's CRC-32 of every record is verified before anything is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["Label", "commit", "pending_name", "read", "read_label", "verify", "write_aside"]

RECORD = "opensmd.json"


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a file is part of.

    Attributes:
        save: the same in all files of one save, different in every save.
        part, parts: which of how many.
    """

    save: str
    part: int
    parts: int


def pending_name(path: Path, save: str) -> Path:
    """Where a file waits for its renaming."""
    return path.with_name(f".{path.name}.{save}.new")


def write_aside(obj: Any, path: Path, label: Label, **options: Any) -> Path:
    """Write ``obj`` next to ``path``, on disk for certain, and return where; ``path`` itself is untouched.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    aside = pending_name(path, label.save)
    try:
        torch.save(obj, aside, **options)
        with zipfile.ZipFile(aside, "a") as archive:
            root = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{root}/{RECORD}", json.dumps(asdict(label)))
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside


def commit(aside: Path, path: Path) -> None:
    """Let what was written aside take the name, at once and for good; older leftovers go."""
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def verify(path: Path) -> None:
    """Check every byte of a file's records against their checksums.

    Raises:
        FileNotFoundError: there is no such file.
        SMPCheckpointError: it is damaged, incomplete, or no file that torch.save wrote.
    """
    with _opened(path) as archive:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise SMPCheckpointError(f"{path} is a zip file, but not one that torch.save or smp.save wrote")
        damaged = archive.testzip()
    if damaged is not None:
        raise SMPCheckpointError(f"{path} is damaged: the checksum of its record {damaged!r} is wrong")


def read_label(path: Path) -> Label | None:
    """What a file is part of; None if ``smp.save`` did not write it."""
    with _opened(path) as archive:
        for name in archive.namelist():
            if name.endswith(f"/{RECORD}"):
                return Label(**json.loads(archive.read(name)))
    return None


def read(path: Path, **options: Any) -> Any:
    """Verify and load a file; ``options`` are torch.load's.

    Raises:
        FileNotFoundError: there is no such file.
        SMPCheckpointError: it is damaged, not a checkpoint, or holds objects that are not allowed.
    """
    if _is_zip(path):
        verify(path)
    try:
        return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        if not _is_zip(path):
            raise SMPCheckpointError(f"{path} is not a checkpoint: {_first_line(error)}") from error
        raise SMPCheckpointError(
            f"{path} holds more than tensors and plain values ({_reason(error)}). If you trust who wrote it, "
            "load it with weights_only=False"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise SMPCheckpointError(f"{path} cannot be loaded: {_first_line(error)}") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        raise SMPCheckpointError(
            f"{path} is damaged, incomplete, or no file that torch.save wrote: {error}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _reason(error: BaseException) -> str:
    found = [line for line in str(error).splitlines() if "Error" in line or "Unsupported" in line]
    return found[-1].strip() if found else _first_line(error)
