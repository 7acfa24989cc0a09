"""One rank of ``smd bench``: both backends in one world, measured alternately."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from opensmd.tools.bench_operations import OPERATIONS, Buffers, Group, Operation

__all__ = ["Result", "as_lines", "main"]

ROUNDS = 5  # turns of each backend at each size
MOST_CALLS = 5000


@dataclass(frozen=True)
class Result:
    """One case: a collective at one size over one backend.

    Attributes:
        bytes: of the whole message, rounded up to whole elements for every rank.
        microseconds: of one call, the median on rank 0.
        bus_gb_per_s: bus bandwidth in 10^9 bytes per second.
        wrong: the number of wrong elements on all ranks.
    """

    collective: str
    bytes: int
    backend: str
    microseconds: float
    bus_gb_per_s: float
    wrong: int


def main() -> None:
    """Measure what the command line requests and print it on rank 0."""
    work = json.loads(sys.argv[1])
    dist.init_process_group("smddp")
    groups: dict[str, Group] = {"gloo": dist.new_group(backend="gloo"), "smddp": dist.group.WORLD}
    results = [
        result
        for name in work["collectives"]
        for size in work["sizes"]
        for result in measure(name, size, work["seconds"], groups)
    ]
    if dist.get_rank() == 0:
        report = {"ranks": dist.get_world_size(), "results": [asdict(result) for result in results]}
        print(json.dumps(report, indent=2) if work["json"] else "\n".join(as_lines(results)), flush=True)
    dist.destroy_process_group()
    if any(result.wrong for result in results):
        raise SystemExit(1)


def as_lines(results: list[Result]) -> list[str]:
    """Return a table with a line per collective and size: times and bus bandwidths of both backends."""
    heads = ("bytes", "gloo us", "GB/s", "smddp us", "GB/s", "faster", "wrong")
    lines = [f"{'collective':<15}" + "".join(f"{head:>12}" for head in heads)]
    for gloo, smddp in zip(results[::2], results[1::2], strict=True):
        cells = [f"{gloo.bytes:,}"]
        for result in (gloo, smddp):
            cells += [f"{result.microseconds:,.1f}", f"{result.bus_gb_per_s:.3f}"]
        cells += [f"{gloo.microseconds / smddp.microseconds:.1f}x", f"{gloo.wrong + smddp.wrong}"]
        lines.append(f"{gloo.collective:<15}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def measure(name: str, size: int, seconds: float, groups: dict[str, Group]) -> list[Result]:
    """Measure the backends of ``groups`` in turns; return their results in the same order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    operation = OPERATIONS[name]
    step = ranks if operation.in_parts else 1
    buffers = Buffers(-(-size // (4 * step)) * step, rank, ranks)
    wrong = {backend: _wrong(operation, buffers, group) for backend, group in groups.items()}
    counts = {b: _calls(operation, buffers, group, seconds / ROUNDS) for b, group in groups.items()}
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    for _ in range(ROUNDS):
        for backend, group in groups.items():
            for _ in range(counts[backend]):
                start = time.perf_counter()
                operation.call(buffers, group)
                times[backend].append(time.perf_counter() - start)
    moved = buffers.count * 4 * operation.share(ranks)
    medians = {backend: statistics.median(seconds_of_calls) for backend, seconds_of_calls in times.items()}
    return [
        Result(name, buffers.count * 4, backend, median * 1e6, moved / median / 1e9, wrong[backend])
        for backend, median in medians.items()
    ]


def _wrong(operation: Operation, buffers: Buffers, group: Group) -> int:
    """Call once and count wrong elements on all ranks."""
    buffers.reset()
    operation.call(buffers, group)
    count = torch.tensor([operation.wrong(buffers)])
    dist.all_reduce(count, group=group)
    return int(count)


def _calls(operation: Operation, buffers: Buffers, group: Group, seconds: float) -> int:
    """Return how many calls fill a turn, the same number on all ranks; also warms up."""
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(3):
        operation.call(buffers, group)
    count = torch.tensor([max(3, int(seconds / ((time.perf_counter() - start) / 3)))])
    dist.broadcast(count, 0, group=group)
    return min(int(count), MOST_CALLS)


if __name__ == "__main__":
    main()
