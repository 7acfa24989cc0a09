"""The folders for a script's results that its variables name: made before it runs, removed if left empty."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["OutputFolders"]


class OutputFolders:
    """The folders the script is told of exist while it runs; those it left empty are removed again."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._wanted = [Path(os.environ[name]) for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR")]

    def __enter__(self) -> None:
        for path in self._wanted:
            self._made += [parent for parent in (path, *path.parents) if not parent.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"cannot make the folder {path}: {error.strerror}"
                print(f"smdrun: {why}; --output names another for what scripts save", file=sys.stderr)
                return

    def __exit__(self, *_: object) -> None:
        for path in sorted(self._made, reverse=True):
            with contextlib.suppress(OSError):  # something lies in it, or another job has removed it
                path.rmdir()
