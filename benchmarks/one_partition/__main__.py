"""``python -m benchmarks.one_partition``: a smp step that has nothing to divide, against plain PyTorch."""

from __future__ import annotations

import os
import time

import torch

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, machine, row
from benchmarks.harness.table import Grid
from benchmarks.pipeline.cases import CASES, Case
from benchmarks.pipeline.steps import build, library_step, plain_step
from opensmd.modelparallel.init import shutdown

PLAIN, OURS = "plain PyTorch", "opensmd"


def main() -> None:
    """Both take steps in turn in this process, on one core."""
    parser = command_parser(__doc__, seconds=6.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["gpt", "mlp", "tiny"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    results = Results("one partition", "1 process on 1 core", machine())
    for name in options.cases:
        for microbatches in options.microbatches:
            case = CASES[name]
            samples = measure(case, microbatches, options.seconds)
            results.rows += [row(case.title, microbatches, *item) for item in samples.items()]
    grid(results).print()
    results.save(options.out / "one-partition.json")


def grid(results: Results) -> Grid:
    """Medians, and how much longer ours takes."""
    lines = []
    for case, microbatches in results.cases():
        first, second = (results.p50(case, microbatches, name) or float("nan") for name in (PLAIN, OURS))
        times = (f"{one / 1e3:.2f}" for one in (first, second))
        lines.append([case, str(microbatches), *times, f"{second / first - 1:+.1%}"])
    headings = ["case", "microbatches", PLAIN, OURS, "longer"]
    return Grid("a step with one partition, milliseconds", headings, lines)


def measure(case: Case, microbatches: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of single steps."""
    smp.init({"partitions": 1, "microbatches": microbatches})
    steps = {
        PLAIN: plain_step(case, microbatches),
        OURS: library_step(case, build(case), microbatches),
    }
    for _ in range(3):
        first, second = (float(step()) for step in steps.values())
        if abs(first - second) > 1e-5 * abs(first):
            raise RuntimeError(f"the losses differ: {first} and {second}")
    samples: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            samples[name].append((time.perf_counter() - start) * 1e6)
    shutdown()
    return samples


if __name__ == "__main__":
    main()
