"""``python -m benchmarks.saving``: how long training stands still for a save, and what it loses in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.saving.rank import MEMORY, NOTHING, RANKS, STEPS, WAYS, Turn

ROOT = Path(__file__).resolve().parents[2]
CALL, STOP, LOST, STEP = "the call, ms", "stops training, ms", "loses in all, ms", "step, ms"


def main() -> None:
    """A job a layout, in which all ways take turns."""
    parser = command_parser(__doc__, seconds=40.0)
    parser.add_argument("--layouts", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    options = parser.parse_args()
    results = Results("saving", "one thread a process", machine())
    for layout in options.layouts:
        found = _run(layout, RANKS[layout], options.seconds, options.ways)
        without = [trained for _, trained, _ in found[NOTHING]]
        results.rows.append(row(layout, 0, STEP, [trained / STEPS for trained in without]))
        for way in options.ways:
            called, trained, ended = zip(*found[way], strict=True)
            for what, times in (
                (CALL, called),
                (STOP, beyond(trained, without)),
                (LOST, beyond(ended, without)),
            ):
                results.rows.append(row(f"{layout}: {way}", 0, what, list(times)))
    grid(results).print()
    results.save(options.out / "saving.json")


def beyond(times: Sequence[float], without: Sequence[float]) -> list[float]:
    """How much longer turns took than those without a save that were beside them."""
    return [time - plain for time, plain in zip(times, without, strict=True)]


def _run(layout: str, ranks: int, seconds: float, ways: Sequence[str]) -> dict[str, list[Turn]]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = str(ROOT / "benchmarks" / "saving" / "rank.py")
    smdrun = [sys.executable, "-m", "opensmd.launch.cli", "-n", str(ranks)]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        command = [*smdrun, script, layout, str(seconds), folder, NOTHING, *ways]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        found: dict[str, list[Turn]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def grid(results: Results) -> Grid:
    """A line a layout and way."""
    lines = []
    for layout in RANKS:
        step = results.p50(layout, 0, STEP)
        if step is None:
            continue
        for way in WAYS[1:]:
            if results.p50(f"{layout}: {way}", 0, CALL) is None:
                continue
            called, stop, lost = (
                results.p50(f"{layout}: {way}", 0, what) or 0.0 for what in (CALL, STOP, LOST)
            )
            lines.append(
                [
                    layout,
                    f"{step:.0f}",
                    way,
                    f"{called:.1f}",
                    f"{stop:.1f}",
                    f"{stop / step:.1%}",
                    f"{lost:.0f}",
                ]
            )
    return Grid("saving", ["layout", STEP, "save", CALL, STOP, "of a step", LOST], lines, left=1)


if __name__ == "__main__":
    main()
