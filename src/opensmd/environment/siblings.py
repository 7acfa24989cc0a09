"""Whether other ranks that smdrun has started still run: a group waits in vain for one that has ended.

Each rank of smdrun notes its process beside the report that it would leave, where those of its host look.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

__all__ = ["REPORT", "ended_siblings", "note_process"]

REPORT = "TORCHELASTIC_ERROR_FILE"  # torch's name for the file of a rank's report
_NOTE = "process"  # in the same folder, which has the rank's number for a name


def note_process(world_size: int) -> None:
    """Let the other ranks of this host see whether this process, a rank of so many, still runs.

    Raises:
        OSError: the note cannot be written.
    """
    partial = Path(os.environ[REPORT]).with_name(f".{_NOTE}")
    partial.write_text(f"{os.getpid()} {world_size} {_pid_namespace()}")
    partial.rename(partial.with_name(_NOTE))


def ended_siblings(ranks: Sequence[int], own: int, world_size: int) -> list[int]:
    """Return which of ``ranks`` have certainly ended; none where this process cannot know.

    Args:
        ranks: of the whole job.
        own: this process's among them. If smdrun has started it as another one, or in a world of another
            size, the script numbers ranks in its own way, and nothing is known.
        world_size: that of the script's world.
    """
    report = os.environ.get(REPORT)
    if not report:
        return []
    folder = Path(report).parent
    if folder.name != str(own) or _note(folder) != (os.getpid(), world_size, _pid_namespace()):
        return []
    return [rank for rank in ranks if _has_ended(folder.with_name(str(rank)))]


def _has_ended(folder: Path) -> bool:
    note = _note(folder)
    if note is None or note[2] != _pid_namespace():
        return False
    try:
        return psutil.Process(note[0]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _note(folder: Path) -> tuple[int, int, int] | None:
    try:
        pid, world_size, namespace = (folder / _NOTE).read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid), int(world_size), int(namespace)


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
