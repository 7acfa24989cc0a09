"""``python -m benchmarks.allocator``: plain PyTorch with and without what smdrun tells the allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.pipeline.cases import CASES
from opensmd.launch.allocator import keeping_memory

USUAL, OURS = "usual", "smdrun's"
MEASURED = ("times", "faults", "peak")
ROUNDS = 8  # a process keeps the places in memory that it has drawn


def main() -> None:
    """Fresh processes in turn, all on one core."""
    parser = command_parser(__doc__, seconds=24.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["gpt", "mlp", "wide", "tiny", "head"])
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environments = {USUAL: bare, OURS: bare | keeping_memory(bare)}
    results = Results("allocator", "1 process on 1 core", machine())
    for name in options.cases:
        found: dict[str, list[dict[str, Any]]] = {USUAL: [], OURS: []}
        for _ in range(ROUNDS):
            for candidate, environment in environments.items():
                found[candidate].append(_run(name, options.seconds / ROUNDS / 2, environment))
        for candidate, runs in found.items():
            for what in MEASURED:
                samples = [one for run in runs for one in run[what]]
                results.rows.append(row(CASES[name].title, 0, f"{candidate}: {what}", samples))
    grid(results).print()
    results.save(options.out / "allocator.json")


def _run(case: str, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.allocator.steps", case, str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def grid(results: Results) -> Grid:
    """Medians of steps, of their page faults and of the processes' peaks, with both."""
    lines = []
    for case, _ in results.cases():
        first, second = ([_median(results, case, name, what) for what in MEASURED] for name in (USUAL, OURS))
        times = [f"{first[0] / 1e3:.1f}", f"{second[0] / 1e3:.1f}", f"{first[0] / second[0]:.3g}x"]
        lines.append([case, *times, *(f"{first[i]:.0f}, {second[i]:.0f}" for i in (1, 2))])
    headings = ["case", f"{USUAL}, ms", f"{OURS}, ms", "ratio", "page faults a step", "peak, MiB"]
    return Grid("steps of plain PyTorch by what the allocator was told", headings, lines)


def _median(results: Results, case: str, candidate: str, what: str) -> float:
    found = results.p50(case, 0, f"{candidate}: {what}")
    assert found is not None
    return found


if __name__ == "__main__":
    main()
