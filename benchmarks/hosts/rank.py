"""One rank of the benchmark between hosts: every operation over each backend, in turn."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.contestants import checked, title
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import Candidate, sample, timed
from benchmarks.hosts.networks import CABLE
from benchmarks.hosts.operations import OPERATIONS, Buffers, Operation
from benchmarks.hosts.ways import EXACT, WAYS

COUNTERS = [Path(f"/sys/class/net/{CABLE}/statistics/{way}_bytes") for way in ("tx", "rx")]
CROSSED = "bytes over the busiest link"


def main() -> None:
    """Measure every operation at every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--operations", nargs="+", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--ways", nargs="*", default=[])
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience, pinned=False)
    results = Results("hosts", me.layout)
    for operation in (each for each in OPERATIONS if each.name in options.operations):
        for nbytes in options.sizes:
            buffers = Buffers.of(nbytes, getattr(torch, options.dtype), me.rank, me.size)
            ways = [(title(backend), backend, operation) for backend in me.groups]
            if operation.name == EXACT.name:
                ways += [(f"smddp: {way}", "smddp", WAYS[way]) for way in options.ways]
            candidates = [candidate(me, *way, buffers) for way in ways]
            found = sample(candidates, me.meeting, me.calm, plan(options))
            results.rows += [row(operation.name, nbytes, name, samples) for name, samples in found.items()]
            for name, backend, way in ways:
                bytes_crossed = crossed(me, backend, way, buffers)
                results.rows.append(row(operation.name, nbytes, f"{name}: {CROSSED}", [bytes_crossed]))
            if me.rank == 0:
                medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-2 * len(found) :])
                print(f"{operation.name} {human_bytes(nbytes)}: {medians}", flush=True)
    leave(me, results)


def candidate(me: Rank, name: str, backend: str, operation: Operation, buffers: Buffers) -> Candidate:
    """One way over a backend, which must first show a right result."""
    group = me.groups[backend]
    block = timed(lambda: operation.call(buffers, group))
    return checked(name, me.meeting, block, buffers.fill, lambda: operation.verify(buffers))


def crossed(me: Rank, backend: str, operation: Operation, buffers: Buffers) -> float:
    """The bytes that one call sends over the busiest link, one way, with their headers."""
    me.meeting.wait()
    before = torch.tensor([int(path.read_text()) for path in COUNTERS])
    me.meeting.wait()
    operation.call(buffers, me.groups[backend])
    dist.barrier()
    most = torch.tensor([int(path.read_text()) for path in COUNTERS]) - before
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most.max())


if __name__ == "__main__":
    main()
