"""One rank of the all-reduce benchmark: all candidates on the same sizes, sample by sample in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.floor.shared import Floor
from benchmarks.harness.contestants import (
    after_a_call,
    in_arena,
    one_after_the_other,
    summing,
    through_torch,
    title,
)
from benchmarks.harness.mpi import raw_loop
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, human_bytes, row
from benchmarks.harness.sampling import UNTIL_STEADY, Candidate, sample, timed


def main() -> None:
    """Measure every size and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--dtypes", nargs="+", required=True)
    options = parser.parse_args()
    me = join(options.backends, patience=options.patience)
    floor = Floor(me.folder / "floor", me.rank, me.size)
    results = Results("all_reduce", me.layout, {"MPI": me.mpi_name or "none"})
    for dtype in options.dtypes:
        for nbytes in options.sizes:
            candidates = contestants(me, floor, nbytes, getattr(torch, dtype))
            found = sample(candidates, me.meeting, me.calm, plan(options, untimed=UNTIL_STEADY))
            results.rows += [row(dtype, nbytes, name, samples) for name, samples in found.items()]
            if me.rank == 0:
                medians = ", ".join(f"{r.candidate} {r.p50:.4g}" for r in results.rows[-len(found) :])
                print(f"{dtype} {human_bytes(nbytes):>8}: {medians}", flush=True)
    leave(me, results)


def contestants(me: Rank, floor: Floor, nbytes: int, dtype: torch.dtype) -> list[Candidate]:
    """Every candidate for one size. All but the zero-copy one work on the same tensor."""
    data = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    found = []
    for backend, group in me.groups.items():
        block = timed(through_torch(data, group))
        wrong = backend == "fake"
        found.append(Candidate(title(backend), block) if wrong else summing(me, title(backend), data, block))
    if "smddp" in me.groups and (arena := in_arena(me.groups["smddp"], data)) is not None:
        found.append(summing(me, "smddp zero-copy", arena, timed(through_torch(arena, me.groups["smddp"]))))
    if dtype != torch.float32:
        return found  # the floor and the loop in C know no other
    if me.mpi is not None:
        found.append(summing(me, f"{me.mpi_name} (C)", data, raw_loop("r", data, data, data.numel())))
        found.append(summing(me, f"{me.mpi_name} (mpi4py)", data, timed(through_mpi4py(me, data))))
    found += floors(me, floor, "floor", "r", data, (data, data))
    if me.size > 1:
        shared = floor.in_shared_memory(data.numel())
        found += floors(me, floor, "floor zero-copy", "z", shared[me.rank], (shared[1], shared[0]))
    return found


def floors(
    me: Rank, floor: Floor, name: str, letter: str, data: torch.Tensor, tensors: tuple[torch.Tensor, ...]
) -> list[Candidate]:
    """The floor in a loop, and called right after torch's do-nothing backend for every sum."""
    what = (letter, *tensors, data.numel())
    found = [summing(me, name, data, floor.loop(*what))]
    if "fake" in me.groups:
        call = one_after_the_other(through_torch(data, me.groups["fake"]), floor.one(*what))
        found.append(summing(me, after_a_call(name), data, timed(call)))
    return found


def through_mpi4py(me: Rank, data: torch.Tensor) -> Callable[[], object]:
    """mpi4py's fast (buffer) all-reduce in place."""
    array, world, in_place = data.numpy(), me.mpi.COMM_WORLD, me.mpi.IN_PLACE
    return lambda: world.Allreduce(in_place, array)


if __name__ == "__main__":
    main()
