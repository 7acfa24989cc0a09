"""Makes the trace and the page from what the ranks of a job have left."""

from __future__ import annotations

from pathlib import Path

from opensmd.timeline.files import read_timeline
from opensmd.timeline.page import write_page
from opensmd.timeline.trace import write_trace

__all__ = ["begin_timeline", "write_results"]

TRACE, PAGE = "trace.json", "timeline.html"


def begin_timeline(folder: Path) -> Path:
    """Make the folder, without what an earlier job left there; return its whole path.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob("rank-*.events"), folder / TRACE, folder / PAGE]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"--timeline {folder}: cannot write there: {error.strerror}") from error
    return folder.resolve()


def write_results(folder: Path) -> tuple[Path, Path]:
    """Write ``trace.json`` and ``timeline.html`` into the folder; return their paths.

    Raises:
        ValueError: no rank has left anything there.
    """
    timeline = read_timeline(folder)
    trace, page = folder / TRACE, folder / PAGE
    write_trace(timeline, trace)
    write_page(timeline, page)
    return trace, page
