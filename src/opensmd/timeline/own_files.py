"""Whether a file that has one of our names is ours: what something else has written stays as it is."""

from __future__ import annotations

from pathlib import Path

__all__ = ["require_own"]

_TOP = 256  # bytes in which a file shows what has written it


def require_own(path: Path, mark: bytes) -> None:
    """Refuse to write over a file without ``mark`` at its top.

    Empty files are taken for those of a job that was killed.

    Raises:
        ValueError: something else has written it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        top = file.read(_TOP)
    if top and mark not in top:
        raise ValueError(
            f"{path} was written by something else, and a timeline would take its place: move it, or "
            "name another folder for the timeline"
        )
