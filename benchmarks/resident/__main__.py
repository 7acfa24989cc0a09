"""``python -m benchmarks.resident``: a rank's resident memory beside its live bytes, three ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.options import command_parser
from benchmarks.harness.process_memory import MIB
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.harness.turns import Started, found_in_turn
from benchmarks.resident.models import FACTORIES, MICROBATCHES, RANKS

ROOT = Path(__file__).resolve().parents[2]
KEPT = "kept tensors"
SETTINGS: dict[str, dict[str, str]] = {
    "glibc as it is": {"GLIBC_TUNABLES": "glibc.malloc.check=0"},  # a choice of the user's: smdrun makes none
    "one heap that keeps all": {"OPENSMD_KEEP_TENSORS": "0"},  # what else smdrun sets
    KEPT: {},
}
STEP, PEAK, LIVE, PREDICTED = "step, ms", "resident, MiB", "live, MiB", "predicted, MiB"


def main() -> None:
    """Fresh jobs of all settings, whose steps take turns."""
    parser = command_parser(__doc__, seconds=0.0)
    parser.add_argument("--cases", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    results = Results("resident", "one thread a process", machine())
    for case in options.cases:
        results.rows += [
            row(case, 0, f"{PREDICTED} of rank {rank}", [size / MIB])
            for rank, size in enumerate(_predicted(case))
        ]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.settings}
        script = str(Path(__file__).with_name("rank.py"))
        started = {name: Started(RANKS[case], [script, case], SETTINGS[name]) for name in found}
        for _ in range(options.rounds):
            for name, job in found_in_turn(started, options.steps).items():
                found[name].append(job)
        for name, jobs in found.items():
            results.rows.append(row(case, 0, f"{name}: {STEP}", [t for job in jobs for t in job["times"]]))
            for rank in range(RANKS[case]):
                for what, key in ((PEAK, "peaks"), (LIVE, "live")):
                    label = f"{name}: {what} of rank {rank}"
                    results.rows.append(row(case, 0, label, [job[key][rank] for job in jobs]))
    grid(results).print()
    results.save(options.out / "resident.json")


def _predicted(case: str) -> list[float]:
    """What ``smd plan`` says of each rank's process, in bytes."""
    target = f"benchmarks.resident.models:{FACTORIES[case]}"
    degrees = [f"--partitions={RANKS[case]}", f"--microbatches={MICROBATCHES}"]
    command = [sys.executable, "-m", "opensmd.tools.cli", "plan", target, *degrees, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [rank["resident"] for rank in json.loads(done.stdout)["ranks"]]


def grid(results: Results) -> Grid:
    """A line a case and setting: the step, each rank's peak, and the worst as a multiple of what is live."""
    lines = []
    for case, _ in results.cases():
        ranks = range(RANKS[case])
        live = [results.p50(case, 0, f"{KEPT}: {LIVE} of rank {rank}") or 0.0 for rank in ranks]
        predicted = [results.p50(case, 0, f"{PREDICTED} of rank {rank}") or 0.0 for rank in ranks]
        for name in SETTINGS:
            step = results.p50(case, 0, f"{name}: {STEP}")
            if step is None:
                continue
            peaks = [results.p50(case, 0, f"{name}: {PEAK} of rank {rank}") or 0.0 for rank in ranks]
            shown = [_texts(peaks), _texts(live), _texts(predicted) if name == KEPT else ""]
            lines.append([case, name, f"{step:.0f}", *shown, _worst(peaks, live)])
    headings = ["case", "memory", STEP, PEAK, LIVE, PREDICTED, "at most, times live"]
    return Grid("resident memory", headings, lines, left=2)


def _texts(sizes: list[float]) -> str:
    return ", ".join(f"{size:.0f}" for size in sizes)


def _worst(peaks: list[float], live: list[float]) -> str:
    return f"{max(peak / least for peak, least in zip(peaks, live, strict=True)):.2f}" if all(live) else ""


if __name__ == "__main__":
    main()
