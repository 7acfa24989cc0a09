"""One rank: every collective through ``torch.distributed`` on smddp and through the old API, in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as today
import torch.distributed.deprecated as legacy

from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import Candidate, sample, timed

Call = Callable[[], object]


def main() -> None:
    """Measure every collective at every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--backend", required=True)
    options = parser.parse_args()
    me = join(["smddp"], patience=options.patience)
    legacy.init_process_group(options.backend, f"file://{me.folder}/legacy", rank=me.rank, world_size=me.size)
    results = Results("legacy", me.layout, {"backend of the old API": options.backend})
    for nbytes in options.sizes:
        for name, (through_torch, through_legacy) in pairs(me, nbytes).items():
            candidates = [
                Candidate("torch.distributed", timed(through_torch)),
                Candidate("deprecated", timed(through_legacy)),
            ]
            found = sample(candidates, me.meeting, me.calm, plan(options))
            results.rows += [row(name, nbytes, key, samples) for key, samples in found.items()]
            if me.rank == 0:
                medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-2:])
                print(f"{name:>10} {human_bytes(nbytes):>7}: {medians}", flush=True)
    me.meeting.wait()
    legacy.destroy_process_group()
    leave(me, results)


def pairs(me: Rank, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """For each collective the call of today and the old one, on the same tensors."""
    group = me.groups["smddp"]
    tensor = torch.ones(nbytes // 4)
    parts = [torch.ones(nbytes // 4) for _ in range(me.size)]
    mine = parts if me.rank == 0 else None
    return {
        "all_reduce": (
            lambda: today.all_reduce(tensor, today.ReduceOp.MAX, group),
            lambda: legacy.all_reduce(tensor, legacy.reduce_op.MAX),
        ),
        "broadcast": (
            lambda: today.broadcast(tensor, 0, group),
            lambda: legacy.broadcast(tensor, 0),
        ),
        "reduce": (
            lambda: today.reduce(tensor, 0, today.ReduceOp.MAX, group),
            lambda: legacy.reduce(tensor, 0, legacy.reduce_op.MAX),
        ),
        "all_gather": (
            lambda: today.all_gather(parts, tensor, group),
            lambda: legacy.all_gather(parts, tensor),
        ),
        "gather": (
            lambda: today.gather(tensor, mine, 0, group),
            lambda: legacy.gather(tensor, dst=0, gather_list=mine),
        ),
        "scatter": (
            lambda: today.scatter(tensor, mine, 0, group),
            lambda: legacy.scatter(tensor, src=0, scatter_list=mine),
        ),
        "barrier": (lambda: today.barrier(group), lambda: legacy.barrier()),
    }


if __name__ == "__main__":
    main()
