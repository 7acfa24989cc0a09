"""One rank of the benchmark of the other collectives: all candidates in turn, operation by operation."""

from __future__ import annotations

import torch

from benchmarks.collectives.operations import OPERATIONS, Buffers, Operation
from benchmarks.floor.shared import Floor
from benchmarks.harness.contestants import after_a_call, checked, one_after_the_other, title
from benchmarks.harness.mpi import raw_loop
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import UNTIL_STEADY, Candidate, sample, timed


def main() -> None:
    """Measure every operation at every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--operations", nargs="+", required=True)
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience)
    floor = Floor(me.folder / "floor", me.rank, me.size)
    results = Results("collectives", me.layout, {"MPI": me.mpi_name or "none"})
    for operation in (one for one in OPERATIONS if one.name in options.operations):
        for nbytes in options.sizes:
            candidates = contestants(me, floor, operation, nbytes)
            found = sample(candidates, me.meeting, me.calm, plan(options, untimed=UNTIL_STEADY))
            results.rows += [row(operation.name, nbytes, name, samples) for name, samples in found.items()]
            if me.rank == 0:
                medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-len(found) :])
                print(f"{operation.name:>14} {human_bytes(nbytes):>7}: {medians}", flush=True)
    leave(me, results)


def contestants(me: Rank, floor: Floor, operation: Operation, nbytes: int) -> list[Candidate]:
    """Every candidate for one operation and size, all on the same two tensors."""
    count = nbytes // 4
    buffers = Buffers(torch.zeros(count), torch.zeros(count), me.rank, me.size)
    found = []
    for backend, group in me.groups.items():
        block = timed(lambda group=group: operation.through_torch(buffers, group))
        if backend == "fake":
            found.append(Candidate(title(backend), block))
        else:
            found.append(_checked(me, title(backend), operation, buffers, block))
    if me.mpi is not None:
        loop = raw_loop(operation.letter, buffers.source, buffers.target, count)
        found.append(_checked(me, f"{me.mpi_name} (C)", operation, buffers, loop))
        world = me.mpi.COMM_WORLD
        block = timed(lambda: operation.through_mpi4py(buffers, world))
        found.append(_checked(me, f"{me.mpi_name} (mpi4py)", operation, buffers, block))
    if me.size == 2:
        what = (operation.letter, buffers.source, buffers.target, count)
        found.append(_checked(me, "floor", operation, buffers, floor.loop(*what)))
        if (fake := me.groups.get("fake")) is not None:
            call = one_after_the_other(lambda: operation.call_alone(buffers, fake), floor.one(*what))
            found.append(_checked(me, after_a_call("floor"), operation, buffers, timed(call)))
    return found


def _checked(me, name, operation, buffers, block):  # type: ignore[no-untyped-def]  # one line over all arguments
    return checked(name, me.meeting, block, buffers.fill, lambda: operation.verify(buffers))


if __name__ == "__main__":
    main()
