"""The folders that variables name for a script's results: created before it runs, removed if left empty."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["OutputFolders"]


class OutputFolders:
    """Creates the folders while the script runs, and removes those that it left empty."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._wanted = [Path(os.environ[name]) for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR")]

    def __enter__(self) -> None:
        for path in self._wanted:
            try:
                self._made += [parent for parent in (path, *path.parents) if not parent.exists()]
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"cannot make the folder {path}: {error.strerror}"
                print(f"smdrun: {why}; --output names another for what scripts save", file=sys.stderr)
                return

    def __exit__(self, *_: object) -> None:
        for path in sorted(self._made, reverse=True):
            with contextlib.suppress(OSError):  # not empty, or another job has removed it
                path.rmdir()
