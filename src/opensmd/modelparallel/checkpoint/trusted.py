"""What a checkpoint may hold and still load without trust in who wrote it (``weights_only=True``).

torch allows tensors and plain values. Scripts also save what is here: values whose making runs no code but
their own type's. The list is explicit; a type comes in when somebody has looked at what making it does.
Types that change when they are filled (deque, defaultdict) are refused by torch's reader whatever the list.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import pathlib
import re
import types
from pathlib import Path
from typing import IO, Any

import torch

from opensmd.modelparallel.checkpoint.numpy_values import checking_globals, numpy_globals

__all__ = ["is_trusted", "load_without_trust", "refused_name"]

_PLAIN: tuple[type, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    bytes,  # empty ones are written as a call
    frozenset,
    range,
    slice,
)
_PATHS: tuple[type, ...] = (
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)
_CONFIGURATION_MODULE = re.compile(r"transformers(\.\w+)*\.configuration_\w+")
_NAME = re.compile(r"GLOBAL (\S+?)\.? ")


def load_without_trust(source: Path | IO[bytes], **options: Any) -> Any:
    """``torch.load(weights_only=True)``, which takes the values of this list too.

    Args:
        source: a file, in torch's zip format or older ones.
        options: torch.load's.
    """
    names = _names(source)
    allowed = [*_PLAIN, *_named_paths(), *_configurations(names)]
    if any(name.startswith("numpy.") for name in names):
        checks = {"map_location": "cpu", "mmap": isinstance(source, Path)}  # a map: the data is not read
        _load_allowing([*allowed, *checking_globals()], source, checks)
        allowed += numpy_globals()
    return _load_allowing(allowed, source, options)


def refused_name(error: BaseException) -> str | None:
    """The function or class that torch refused, of its error; None if something else went wrong."""
    found = _NAME.search(str(error))
    return found[1] if found is not None else None


def is_trusted(kind: type) -> bool:
    """Whether values of this type load without trust, if what is in them does."""
    return kind in _PLAIN or kind in _PATHS or _is_configuration(kind)


def _load_allowing(ours: list[Any], source: Path | IO[bytes], options: dict[str, Any]) -> Any:
    """Load where torch takes these; what the script has allowed stays allowed."""
    theirs = torch.serialization.get_safe_globals()
    if not isinstance(source, Path):
        source.seek(0)
    with torch.serialization.safe_globals([entry for entry in ours if entry not in theirs]):
        return torch.load(source, weights_only=True, **options)


def _names(source: Path | IO[bytes]) -> list[str]:
    """What the file names that torch does not allow by itself."""
    try:
        if not isinstance(source, Path):
            source.seek(0)
        return torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # loading says what is wrong with the file
        return []


def _named_paths() -> list[tuple[type, str]]:
    return [
        (path, f"{module}.{path.__name__}") for path in _PATHS for module in ("pathlib", "pathlib._local")
    ]


def _configurations(names: list[str]) -> list[type]:
    """Configurations of transformers that the file names: data with methods, filled without calls."""
    found = (_found(*name.rpartition(".")[::2]) for name in names)
    return [kind for kind in found if isinstance(kind, type) and _is_configuration(kind)]


def _found(module: str, name: str) -> Any:
    if _CONFIGURATION_MODULE.fullmatch(module) is None:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _is_configuration(kind: type) -> bool:
    if _CONFIGURATION_MODULE.fullmatch(kind.__module__) is None:
        return False
    module = importlib.import_module("transformers.configuration_utils")
    return issubclass(kind, module.PretrainedConfig)
