"""``python -m benchmarks.saving``: how long training stands still for a save, and what it loses in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.saving.rank import MEMORY, NOTHING, RANKS, STEPS, WAYS

ROOT = Path(__file__).resolve().parents[2]
STOOD, LOST, STEP = "stands still, ms", "loses in all, ms", "step, ms"


def main() -> None:
    """A job a layout, in which all ways take turns."""
    options = command_parser(__doc__, seconds=40.0).parse_args()
    results = Results("saving", "one thread a process", machine())
    for layout, ranks in RANKS.items():
        found = _run(layout, ranks, options.seconds)
        without = [total for total, _ in found[NOTHING]]
        results.rows.append(row(layout, 0, STEP, [total / STEPS for total in without]))
        for way in WAYS[1:]:
            lost = [total - plain for (total, _), plain in zip(found[way], without, strict=True)]
            results.rows.append(row(f"{layout}: {way}", 0, STOOD, [stood for _, stood in found[way]]))
            results.rows.append(row(f"{layout}: {way}", 0, LOST, lost))
    grid(results).print()
    results.save(options.out / "saving.json")


def _run(layout: str, ranks: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = str(ROOT / "benchmarks" / "saving" / "rank.py")
    smdrun = [sys.executable, "-m", "opensmd.launch.cli", "-n", str(ranks)]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        command = [*smdrun, script, layout, str(seconds), folder]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        found: dict[str, list[tuple[float, float]]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def grid(results: Results) -> Grid:
    """A line a layout and way."""
    lines = []
    for layout in RANKS:
        step = results.p50(layout, 0, STEP) or 0.0
        for way in WAYS[1:]:
            stood, lost = (results.p50(f"{layout}: {way}", 0, what) or 0.0 for what in (STOOD, LOST))
            part = f"{stood / step:.1%}" if step else ""
            lines.append([layout, f"{step:.0f}", way, f"{stood:.1f}", part, f"{lost:.0f}"])
    return Grid("saving", ["layout", STEP, "save", STOOD, "of a step", LOST], lines, left=1)


if __name__ == "__main__":
    main()
