"""``python -m benchmarks.memory``: a rank's memory and time with each setting for models that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, Row, machine, row
from benchmarks.harness.table import Grid
from benchmarks.harness.turns import Started, found_in_turn
from benchmarks.memory.cases import CASES, PLAIN

FULLEST, TIMES = "memory, MiB", "step, ms"
# Large blocks are mapped one by one, so that what a rank has is what its tensors need.
COUNTING = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


def main() -> None:
    """Memory of fresh jobs of two ranks; then each beside the plain one, steps in turn."""
    parser = command_parser(__doc__, seconds=0.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--beside", choices=CASES, default=PLAIN, help="what times are compared with")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    results = Results("memory", "2 processes", machine())
    others = [case for case in options.cases if case != options.beside]
    memory = {case: _memory(case) for case in (options.beside, *others)}
    pairs = {case: _times(case, options.beside, options.steps) for case in others}
    plain = [time for _, besides in pairs.values() for time in besides]
    results.rows += _rows(options.beside, memory[options.beside], plain, plain)
    for case, (times, besides) in pairs.items():
        results.rows += _rows(case, memory[case], times, besides)
    grid(results).print()
    results.save(options.out / "memory.json")


def _memory(case: str) -> list[float]:
    found: list[float] = found_in_turn({case: _job(case, "memory", COUNTING)}, 2)[case]
    return found


def _times(case: str, beside: str, steps: int) -> tuple[list[float], list[float]]:
    """Of the steps, and of those beside them."""
    jobs = {name: _job(name, "times", {}) for name in (beside, case)}
    found = found_in_turn(jobs, steps)
    return found[case], found[beside]


def _rows(case: str, memory: list[float], times: list[float], besides: list[float]) -> list[Row]:
    """With the times as multiples of those beside them: the machine's speed changes."""
    ratios = [mine / plain for mine, plain in zip(times, besides, strict=True)]
    found = ((FULLEST, memory), (TIMES, times), ("ratio", ratios))
    return [row(case, 0, what, values) for what, values in found if values]


def _job(case: str, what: str, more: Mapping[str, str]) -> Started:
    return Started(2, [str(Path(__file__).with_name("rank.py")), case, what], more)


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
