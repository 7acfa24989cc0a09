"""Checking that a file with one of our names is ours, so that foreign files are not overwritten."""

from __future__ import annotations

from pathlib import Path

__all__ = ["require_own"]

_TOP = 256  # bytes within which a file shows what has written it


def require_own(path: Path, mark: bytes) -> None:
    """Refuse to overwrite a file without ``mark`` at its top.

    Empty files count as those of a killed job.

    Raises:
        ValueError: something else has written the file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        top = file.read(_TOP)
    if top and mark not in top:
        raise ValueError(
            f"{path} was written by something else, and a timeline would take its place: move it, or "
            "name another folder for the timeline"
        )
