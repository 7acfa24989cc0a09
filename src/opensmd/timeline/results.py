"""Creating the trace and the page from what the ranks of a job have recorded.

They replace those of an earlier job. If something else has written files of the same names, such as a
profiler's ``trace.json``, these stay and the folder is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from opensmd.timeline import page, trace
from opensmd.timeline.files import read_timeline
from opensmd.timeline.frames import BEGINNING
from opensmd.timeline.own_files import require_own

__all__ = ["begin_timeline", "write_results"]

TRACE, PAGE, RANKS = "trace.json", "timeline.html", "rank-*.events"
_MARKS = {TRACE: json.dumps(trace.WRITER)[:-1].encode(), PAGE: page.WRITER.encode()}


def begin_timeline(folder: Path) -> Path:
    """Create the folder, or clear what an earlier job left in it; return its absolute path.

    Raises:
        ValueError: the folder cannot be created or written, or has foreign files with our names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = [path for name in (RANKS, TRACE, PAGE) for path in sorted(folder.glob(name))]
        _require_ours(old)
        for path in old:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"--timeline {folder}: cannot write there: {error.strerror}") from error
    return folder.resolve()


def write_results(folder: Path) -> tuple[Path, Path]:
    """Write ``trace.json`` and ``timeline.html`` to the folder; return their paths.

    Raises:
        ValueError: no rank has recorded anything there, or there are foreign files with these names.
    """
    timeline = read_timeline(folder)
    results = folder / TRACE, folder / PAGE
    _require_ours([path for path in results if path.exists()])
    trace.write_trace(timeline, results[0])
    page.write_page(timeline, results[1])
    return results


def _require_ours(paths: list[Path]) -> None:
    for path in paths:
        require_own(path, _MARKS.get(path.name, BEGINNING))
