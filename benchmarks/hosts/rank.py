"""One rank of the benchmark over two hosts: all-reduce over each backend, in turn."""

from __future__ import annotations

import torch

from benchmarks.harness.contestants import summing, through_torch, title
from benchmarks.harness.options import rank_parser
from benchmarks.harness.rank import join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import Plan, sample, timed


def main() -> None:
    """Measure every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience)
    results = Results("hosts", f"{me.layout}, half of them on each of two hosts")
    for nbytes in options.sizes:
        data = torch.zeros(nbytes // 4)
        candidates = [
            summing(me, title(backend), data, timed(through_torch(data, group)))
            for backend, group in me.groups.items()
        ]
        found = sample(candidates, me.meeting, me.calm, Plan(options.seconds))
        results.rows += [row("float32", nbytes, name, samples) for name, samples in found.items()]
        if me.rank == 0:
            medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-len(found) :])
            print(f"{human_bytes(nbytes):>8}: {medians}", flush=True)
    leave(me, results)


if __name__ == "__main__":
    main()
