"""One rank of the benchmark of small messages: all candidates on the same sizes, sample by sample in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch

import opensmd
from benchmarks.harness.contestants import summing, through_torch
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import UNTIL_STEADY, Candidate, sample, timed
from benchmarks.small_messages.deepspeed_operator import deepspeed_all_reduce, remove_buffers

Reduce = Callable[[torch.Tensor], object]


def main() -> None:
    """Measure every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    options = parser.parse_args()
    me = join(["smddp"], patience=options.patience)
    rival = deepspeed_all_reduce(me)
    results = Results("small messages", me.layout)
    for nbytes in options.sizes:
        data = torch.zeros(nbytes // 4)
        found = sample(contestants(me, data, rival), me.meeting, me.calm, plan(options, untimed=UNTIL_STEADY))
        results.rows += [row("float32", nbytes, name, samples) for name, samples in found.items()]
        if me.rank == 0:
            medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-len(found) :])
            print(f"{human_bytes(nbytes):>8}: {medians}", flush=True)
    leave(me, results)
    remove_buffers(me)


def contestants(me: Rank, data: torch.Tensor, rival: Reduce | None) -> list[Candidate]:
    """The object, the operator, ``dist.all_reduce`` and DeepSpeed's operator, all on one tensor."""
    group = me.groups["smddp"]
    direct, operator, name = opensmd.direct(group), torch.ops.opensmd.all_reduce_, group.group_name
    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: direct.all_reduce_(data),
        "torch.ops.opensmd": lambda: operator(data, "sum", name),
        "torch.distributed": through_torch(data, group),
    }
    if rival is not None:
        calls["DeepSpeed's operator"] = lambda: rival(data)
    return [summing(me, name, data, timed(call)) for name, call in calls.items()]


if __name__ == "__main__":
    main()
