"""What a checkpoint may hold and still load without trusting its author (``weights_only=True``).

torch allows tensors and plain values. Scripts also save the types listed here, whose creation runs no code
but their own. The list is explicit: a type is added after somebody has reviewed what creating it does.
torch's reader refuses types that change when filled (deque, defaultdict), whatever the list says.
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
    bytes,  # empty bytes are pickled as a call
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
    """Call ``torch.load(weights_only=True)``, but also accept the types of this list.

    Args:
        source: a file in torch's zip format or an older one.
        options: torch.load's.
    """
    names = _names(source)
    allowed = [*_PLAIN, *_named_paths(), *_configurations(names)]
    if any(name.startswith("numpy.") for name in names):
        checks = {"map_location": "cpu", "mmap": isinstance(source, Path)}  # mapped: the data is not read
        _load_allowing([*allowed, *checking_globals()], source, checks)
        allowed += numpy_globals()
    return _load_allowing(allowed, source, options)


def refused_name(error: BaseException) -> str | None:
    """Return the function or class that torch's error refuses; None if something else went wrong."""
    found = _NAME.search(str(error))
    return found[1] if found is not None else None


def is_trusted(kind: type) -> bool:
    """Whether values of this type load without trust, provided their contents do."""
    return kind in _PLAIN or kind in _PATHS or _is_configuration(kind)


def _load_allowing(ours: list[Any], source: Path | IO[bytes], options: dict[str, Any]) -> Any:
    """Load with these types allowed, in addition to those that the script has allowed."""
    theirs = torch.serialization.get_safe_globals()
    if not isinstance(source, Path):
        source.seek(0)
    with torch.serialization.safe_globals([entry for entry in ours if entry not in theirs]):
        return torch.load(source, weights_only=True, **options)


def _names(source: Path | IO[bytes]) -> list[str]:
    """Return the globals in the file that torch does not allow by itself."""
    try:
        if not isinstance(source, Path):
            source.seek(0)
        return torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # loading will say what is wrong with the file
        return []


def _named_paths() -> list[tuple[type, str]]:
    return [
        (path, f"{module}.{path.__name__}") for path in _PATHS for module in ("pathlib", "pathlib._local")
    ]


def _configurations(names: list[str]) -> list[type]:
    """Return the transformers configurations in the file: data with methods, filled without calls."""
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
