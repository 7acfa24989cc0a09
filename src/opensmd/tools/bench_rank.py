"""One rank of ``smd bench``: both backends in one process group world, measured in turns."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

__all__ = ["main"]

ROUNDS = 5  # turns that each backend gets at each size


def main() -> None:
    """Measure the sizes of the command line and print the table on rank 0."""
    sizes, seconds = [int(each) for each in sys.argv[1].split(",")], float(sys.argv[2])
    dist.init_process_group("smddp")
    groups = {"gloo": dist.new_group(backend="gloo"), "smddp": dist.group.WORLD}
    table = Table(
        "bytes", "gloo us", "smddp us", "times faster", title=f"all_reduce, {dist.get_world_size()} ranks"
    )
    for size in sizes:
        medians = measure(size, seconds, groups)
        ratio = medians["gloo"] / medians["smddp"]
        table.add_row(f"{size:,}", f"{medians['gloo']:,.1f}", f"{medians['smddp']:,.1f}", f"{ratio:.1f}")
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


def measure(size: int, seconds: float, groups: dict[str, dist.ProcessGroup | None]) -> dict[str, float]:
    """Median microseconds of one call, by backend."""
    tensor = torch.zeros(size // 4)
    times: dict[str, list[float]] = {name: [] for name in groups}
    counts = {name: _calls(tensor, group, seconds / ROUNDS) for name, group in groups.items()}
    for _ in range(ROUNDS):
        for name, group in groups.items():
            for _ in range(counts[name]):
                start = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def _calls(tensor: torch.Tensor, group: dist.ProcessGroup | None, seconds: float) -> int:
    """How many calls fill a turn, the same on all ranks; warms up on the way."""
    start = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    count = torch.tensor([max(3, int(seconds / ((time.perf_counter() - start) / 3)))])
    dist.broadcast(count, 0, group=group)
    return min(int(count), 5000)


if __name__ == "__main__":
    main()
