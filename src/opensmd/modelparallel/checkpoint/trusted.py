"""What a checkpoint may hold and still load without trust in who wrote it (``weights_only=True``).

torch allows tensors and plain values. Scripts also save what is here: values whose making runs no code but
their own type's. The list is explicit; a type comes in when somebody has looked at what making it does.
Types that change when they are filled (deque, defaultdict) are refused by torch's reader whatever the list.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import pathlib
import re
import types
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

__all__ = ["is_trusted", "load_without_trust", "refused_name"]

_PLAIN: tuple[type, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
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
    with _allowing(source):
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, weights_only=True, **options)


def refused_name(error: BaseException) -> str | None:
    """The function or class that torch refused, of its error; None if something else went wrong."""
    found = _NAME.search(str(error))
    return found[1] if found is not None else None


def is_trusted(kind: type) -> bool:
    """Whether values of this type load without trust, if what is in them does."""
    return kind in _PLAIN or kind in _PATHS or _is_configuration(kind)


def _allowing(source: Path | IO[bytes]) -> AbstractContextManager[Any]:
    """The context in which torch takes this list; what the script has allowed stays allowed after it."""
    ours: list[Any] = [*_harmless(), *_configurations(source)]
    theirs = set(torch.serialization.get_safe_globals())
    context: AbstractContextManager[Any] = torch.serialization.safe_globals(
        [each for each in ours if each not in theirs]
    )
    return context


@functools.cache
def _harmless() -> tuple[Any, ...]:
    paths = [
        (path, f"{module}.{path.__name__}") for path in _PATHS for module in ("pathlib", "pathlib._local")
    ]
    reduced: tuple[Any, ...] = np.float64(0).__reduce__(), np.zeros(1).__reduce__()
    functions = [
        (reduce[0], f"numpy.{core}.multiarray.{reduce[0].__name__}")  # the name before NumPy 2 and since
        for reduce in reduced
        for core in ("core", "_core")
    ]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    return (*_PLAIN, *paths, *functions, np.ndarray, np.dtype, *dtypes)


def _configurations(source: Path | IO[bytes]) -> list[type]:
    """Configurations of transformers that the file names: data with methods, filled without calls."""
    try:
        if not isinstance(source, Path):
            source.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # loading says what is wrong with the file
        return []
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
