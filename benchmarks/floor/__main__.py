"""``python -m benchmarks.floor``: build the floor program, run it, keep its numbers."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from benchmarks.harness.native import build
from benchmarks.harness.results import Results, Row, machine

OUT = Path("out/bench")
PAUSE = 5.0
NEAREST = "flags_round_trip"
WORDS = {
    "copy_1_core": "memory copy, 1 core",
    "copy_2_cores": "memory copy, 2 cores together",
    "copy_around_2_cores": "memory copy past the caches, 2 cores together",
    "read_and_write_64_MiB": "one core reads 64 MiB while the other writes 64 MiB past the caches",
    "sum_1_core": "a += b, 1 core",
    "sum_2_cores": "a += b, 2 cores together",
    "flags_round_trip": "raise my flag and see the other's, 2 cores",
    "two_shot_64_MiB": "plain two-shot all-reduce of 64 MiB, 2 cores",
}


def best_of(program: Path, tries: int) -> list[list[str]]:
    """The lines of the run in which the cores were nearest (see ``harness.cores``)."""
    runs = []
    for turn in range(tries):
        if turn:
            time.sleep(PAUSE)
        printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout
        runs.append([line.split() for line in printed.splitlines()])
    return min(runs, key=lambda lines: next(float(value) for name, value, _ in lines if name == NEAREST))


def main() -> None:
    """Print and save what this machine can do at best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the results")
    parser.add_argument("--tries", type=int, default=5, help="the one with the nearest cores counts")
    options = parser.parse_args()
    program = build(Path(__file__).with_name("floor_main.cpp"), shared=False)
    results = Results("floor", "1 or 2 processes, one a core", machine())
    for name, value, unit in best_of(program, options.tries):
        print(f"{WORDS[name]:68} {float(value):8.3f} {unit}")
        results.rows.append(Row(f"{WORDS[name]} [{unit}]", 0, "floor", float(value), float(value), 15))
    results.save(options.out / "floor.json")


if __name__ == "__main__":
    main()
