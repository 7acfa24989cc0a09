"""``python -m benchmarks.memory``: a rank's memory and time with each setting for models that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.memory.cases import CASES, PLAIN

ROOT = Path(__file__).resolve().parents[2]
FULLEST, TIMES = "memory, MiB", "step, ms"
# Large blocks are mapped one by one, so that what a rank has is what its tensors need.
COUNTING = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


def main() -> None:
    """Fresh jobs of two ranks, all settings in turn."""
    parser = command_parser(__doc__, seconds=10.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    cases = list(dict.fromkeys([PLAIN, *options.cases]))
    results = Results("memory", "2 processes", machine())
    for case in cases:
        results.rows.append(row(case, 0, FULLEST, _run(case, 0.0, COUNTING)))
    found: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            found[case] += _run(case, options.seconds / options.rounds, {})
    # Beside the plain case's of the same round: the machine's speed changes.
    for case in cases:
        ratios = [mine / plain for mine, plain in zip(found[case], found[PLAIN], strict=True)]
        results.rows.append(row(case, 0, TIMES, found[case]))
        results.rows.append(row(case, 0, "ratio", ratios))
    grid(results).print()
    results.save(options.out / "memory.json")


def _run(case: str, seconds: float, more: Mapping[str, str]) -> list[float]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **more}
    script = str(ROOT / "benchmarks" / "memory" / "rank.py")
    smdrun = [sys.executable, "-m", "opensmd.launch.cli", "-n", "2"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        subprocess.run([*smdrun, script, case, str(seconds), str(file)], env=env, check=True)
        found: list[float] = json.loads(file.read_text())
    return found


def grid(results: Results) -> Grid:
    """Memory, and the time as a multiple of the plain case's."""
    lines = []
    for case, _ in results.cases():
        numbers = [results.p50(case, 0, what) or 0.0 for what in (FULLEST, TIMES)]
        ratio = results.p50(case, 0, "ratio") or 0.0
        lines.append([case, *(f"{number:.0f}" for number in numbers), f"{ratio:.2f}x"])
    return Grid("two ranks", ["setting", FULLEST, TIMES, "time"], lines)


if __name__ == "__main__":
    main()
