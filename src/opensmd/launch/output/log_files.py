"""One file per rank with all its output, in addition to the console (``--log-dir``)."""

from __future__ import annotations

from io import FileIO
from itertools import count
from pathlib import Path

__all__ = ["LogFiles"]


class LogFiles:
    """``rank-N.log`` in a folder, from the job's beginning; nothing without a folder.

    An existing file of that name gets a number appended.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[int, FileIO] = {}

    def write(self, rank: int, data: bytes) -> None:
        """Add bytes to a rank's file.

        Raises:
            OSError: the first time that a file cannot be written; after that, none is.
        """
        if self._folder is None:
            return
        try:
            if rank not in self._files:
                self._files[rank] = _new(self._folder / f"rank-{rank}.log")
            self._files[rank].write(data)
        except OSError:
            self.close()
            self._folder = None
            raise

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _new(path: Path) -> FileIO:
    if path.exists():
        path.rename(next(name for number in count(1) if not (name := Path(f"{path}.{number}")).exists()))
    return path.open("xb", buffering=0)
