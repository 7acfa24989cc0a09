"""Files that survive a kill: written under a temporary name, flushed to disk, renamed; verified when read.

Files have torch's own zip format, so plain ``torch.load`` reads them; the end says what a file is part of
(see ``seal``). After writing, a file is read back once, without the data of its tensors, so that nobody finds
out only when resuming that it does not load.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.first_line import first_line
from opensmd.modelparallel.checkpoint.contents import describe, find_unloadable
from opensmd.modelparallel.checkpoint.names import pending_name, pending_of
from opensmd.modelparallel.checkpoint.records import verify_records
from opensmd.modelparallel.checkpoint.seal import Label, SealingFile, is_zip, read_seal
from opensmd.modelparallel.checkpoint.trusted import load_without_trust, refused_name
from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["PROTOCOL", "Caller", "commit", "read", "verify", "write_aside"]

PROTOCOL = 2  # of pickle; the only one that torch reads without trust


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What the user's call is named in errors.

    Attributes:
        save, load: the function that writes, and the one that will read.
        content: the argument with the object.
    """

    save: str = "smp.save"
    load: str = "smp.load"
    content: str = "obj"


def write_aside(
    obj: Any,
    path: Path,
    label: Label,
    *,
    caller: Caller,
    weights_only: bool = True,
    between: Callable[[], None] | None = None,
    **options: Any,
) -> Path:
    """Write ``obj`` next to ``path``, flush it to disk, and return the file; ``path`` itself is untouched.

    Args:
        weights_only: refuse what loads only with ``weights_only=False``.
        between: called between pieces of the write.
        options: torch.save's.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
        TypeError: something in ``obj`` cannot be saved, or would not load.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{caller.save}: {path} cannot be written, as there is no folder {path.parent}; make it first"
        )
    aside = path.with_name(pending_name(path.name, label.save))
    try:
        _write(obj, aside, label, caller, between, options)
        if weights_only:
            _check_that_it_loads(obj, aside, caller)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside


def _write(
    obj: Any,
    aside: Path,
    label: Label,
    caller: Caller,
    between: Callable[[], None] | None,
    options: dict[str, Any],
) -> None:
    target: SealingFile | None = None
    try:
        with aside.open("w+b") as file:
            target = SealingFile(file, between)
            torch.save(obj, target, **options)  # type: ignore[arg-type]  # it needs write alone
            target.seal(label)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if target is None or target.failure is not None:
            raise _naming(error, aside) from None  # torch's error names neither file nor cause
        raise _naming(error, aside) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        found = find_unloadable(obj, caller.content)
        where = (
            f"{found[0]} is {describe(found[1])}, which" if found else f"{caller.content}: something in it"
        )
        raise TypeError(f"{caller.save}: {where} cannot be saved ({error}); nothing was saved") from error
    except RuntimeError:
        if target is None or target.failure is None:
            raise
        raise _naming(target.failure, aside) from None


def _naming(error: OSError, path: Path) -> OSError:
    """Return the system's error with the file's name, which errors of writes lack."""
    return OSError(error.errno, error.strerror, str(path))


def _check_that_it_loads(obj: Any, aside: Path, caller: Caller) -> None:
    try:
        _load_without_data(aside)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        found = find_unloadable(obj, caller.content)
        where = (
            f"{found[0]} is {describe(found[1])}, which" if found else f"{caller.content} {_why(error)} and"
        )
        raise TypeError(
            f"{caller.save}: {where} would not load again without trust in the file. Nothing was saved. "
            "Save plain values of it instead, such as its vars() or state_dict(). If only you will load the "
            f"file, give weights_only=False to {caller.save} and to {caller.load}"
        ) from error


def _load_without_data(path: Path) -> None:
    """Load a file except the data of tensors, by mapping it, or more slowly where that is impossible."""
    try:
        load_without_trust(path, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        with FakeTensorMode():  # if a memory limit counts the map
            load_without_trust(path, map_location="cpu")


def commit(aside: Path, path: Path, *, alone: bool) -> None:
    """Rename the temporary file to its final name, atomically and durably.

    Args:
        alone: no other process writes under this name, so other files waiting for it are left from killed
            saves, and are deleted.
    """
    aside.replace(path)
    if alone:
        for leftover in pending_of(path.name, (file.name for file in path.parent.iterdir())):
            path.with_name(leftover).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def verify(path: Path) -> None:
    """Check every byte of a file that a checksum covers.

    Raises:
        OSError: there is no such file, or it cannot be opened.
        SMPCheckpointError: it is damaged, incomplete, or was not written by torch.save.
    """
    seal = read_seal(path)
    if seal is not None:
        seal.verify(path)
    elif is_zip(path):
        verify_records(path)


def read(path: Path, *, weights_only: bool = True, **options: Any) -> Any:
    """Verify and load a file with torch.load's ``options``.

    Raises:
        OSError: there is no such file, or it cannot be opened.
        SMPCheckpointError: it is damaged, not a checkpoint, or holds objects that are not allowed.
    """
    verify(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error below says so
            if weights_only:
                return load_without_trust(path, **options)
            return torch.load(path, weights_only=False, **options)
    except Exception as error:  # damage, or code of an unknown type, may raise anything
        raise SMPCheckpointError(_why_not(path, error)) from error


def _why_not(path: Path, error: Exception) -> str:
    if not is_zip(path):
        return f"{path} is not a checkpoint{_naming_what_it_asks_for(error)}"
    if not isinstance(error, pickle.UnpicklingError):
        return f"{path} cannot be loaded: {type(error).__name__}: {first_line(error)}"
    protocol = _protocol(path)
    if protocol > PROTOCOL and refused_name(error) is None:
        return (
            f"{path} was written with pickle_protocol={protocol}, and files load without trust in who wrote "
            f"them only if they were written with {PROTOCOL}, the default. If it is a file of your own, "
            "load it with weights_only=False and save it again"
        )
    return (
        f"{path} {_why(error)}, which is neither a tensor nor a plain value, so nothing in the file was run "
        "or loaded. If it is a file of your own, load it with weights_only=False, which runs any code in the "
        "file: never do so with files of others"
    )


def _why(error: BaseException) -> str:
    name = refused_name(error)
    return f"asks for {name}" if name else f"holds what torch's safe reader does not know ({_reason(error)})"


def _naming_what_it_asks_for(error: BaseException) -> str:
    name = refused_name(error)
    return f"; it is a pickle that asks for {name}, of which nothing was run" if name else ""


def _protocol(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        name = next(record for record in archive.namelist() if record.endswith("/data.pkl"))
        with archive.open(name) as record:
            start = record.read(2)
    return start[1] if start[:1] == pickle.PROTO and len(start) == 2 else 0


def _reason(error: BaseException) -> str:
    """Return the reason in torch's error, which follows its advice."""
    reason = str(error).partition("WeightsUnpickler error:")[2].strip()
    return reason.partition("\n")[0] or type(error).__name__
