"""One rank of the benchmark over two hosts: all-reduce over each backend, in turn."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.harness.contestants import checked, title
from benchmarks.harness.options import rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import Candidate, Plan, sample, timed


def main() -> None:
    """Measure every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience)
    results = Results("hosts", f"{me.layout}, half of them on each of two hosts")
    for nbytes in options.sizes:
        candidates = [summing(me, backend, torch.zeros(nbytes // 4)) for backend in me.groups]
        found = sample(candidates, me.meeting, me.calm, Plan(options.seconds))
        results.rows += [row("float32", nbytes, name, samples) for name, samples in found.items()]
        if me.rank == 0:
            medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-len(found) :])
            print(f"{human_bytes(nbytes):>8}: {medians}", flush=True)
    leave(me, results)


def summing(me: Rank, backend: str, data: torch.Tensor) -> Candidate:
    """``dist.all_reduce`` on the backend's group, which must first give a right sum."""
    group = me.groups[backend]

    def fill() -> None:
        data.fill_(me.rank + 1)

    def verify() -> bool:
        right = bool((data == me.size * (me.size + 1) / 2).all())
        data.zero_()
        return right

    block = timed(lambda: dist.all_reduce(data, group=group))
    return checked(title(backend), me.meeting, block, fill, verify)


if __name__ == "__main__":
    main()
