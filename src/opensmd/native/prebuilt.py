"""A core that came with the wheel, compiled for one build of torch and one Python.

Its folder says for which: ``prebuilt/torch-2.13.0+cpu-cpython-311-x86_64-linux-gnu``. The key next to the
library says from which sources and flags it was made, so that an edited checkout never runs an old core.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from opensmd.environment.private_files import who_else_can_change
from opensmd.native.recipe import MODULE, base_key

__all__ = ["find_prebuilt", "is_prebuilt", "put_prebuilt"]

FOLDER = Path(__file__).parent / "prebuilt"


def find_prebuilt() -> Path | None:
    """Return the core in this installation that fits this torch and Python; None if there is none."""
    folder = FOLDER / _name()
    library, key = folder / f"{MODULE}.so", folder / "key"
    if not library.exists() or not key.exists() or key.read_text() != base_key():
        return None
    changeable = who_else_can_change(library)
    if changeable is not None:
        print(f"opensmd: the core in the package is not used: {changeable}", file=sys.stderr)
        return None
    return library


def is_prebuilt(library: Path) -> bool:
    """Whether a library came with the wheel."""
    return FOLDER in library.parents


def put_prebuilt(library: Path, root: Path) -> None:
    """Copy a compiled core to its place in a wheel with the root ``root``."""
    folder = root / FOLDER.relative_to(Path(__file__).parents[2]) / _name()
    folder.mkdir(parents=True)
    shutil.copyfile(library, folder / library.name)
    (folder / library.name).chmod(0o755)
    (folder / "key").write_text(base_key())


def _name() -> str:
    return f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
