"""Training steps of plain PyTorch in a fresh process, which prints as JSON what they took."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch

from benchmarks.pipeline.cases import CASES
from benchmarks.pipeline.steps import plain_step

MICROBATCHES = 4


def main() -> None:
    """``steps.py CASE SECONDS``: microseconds and page faults of each step, and the peak in MiB."""
    torch.set_num_threads(1)
    step = plain_step(CASES[sys.argv[1]], MICROBATCHES)
    for _ in range(3):
        step()
    times, faults = [], []
    end = time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        before, start = _usage().ru_minflt, time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
        faults.append(_usage().ru_minflt - before)
    print(json.dumps({"times": times, "faults": faults, "peak": [_usage().ru_maxrss / 1024]}))


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)


if __name__ == "__main__":
    main()
