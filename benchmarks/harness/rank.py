"""A rank's side of a benchmark: which rank it is, its core, its process groups, its MPI."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import mpi
from benchmarks.harness.cores import Cores
from benchmarks.harness.meeting import Meeting
from benchmarks.harness.results import Results

__all__ = ["Rank", "join", "leave"]


@dataclass(frozen=True)
class Rank:
    """This rank, mostly pinned to its core, with one process group a backend over the same ranks."""

    rank: int
    size: int
    cores: int
    meeting: Meeting
    calm: Cores
    groups: dict[str, dist.ProcessGroup]
    mpi: Any
    mpi_name: str
    folder: Path

    @property
    def layout(self) -> str:
        """How many ranks on how many cores."""
        cores = min(self.size, self.cores)
        return f"{self.size} ranks on {cores} core{'s' if cores > 1 else ''}"


def join(backends: Sequence[str], *, patience: float, pinned: bool = True) -> Rank:
    """Become a rank of the benchmark that :func:`benchmarks.harness.launch.run` started.

    Args:
        backends: of the groups to make.
        patience: seconds to wait for cores that are near each other and free.
        pinned: to a core; otherwise the kernel chooses, as for threads that wait for networks it must.
    """
    rank, size = _identity()
    available = sorted(os.sched_getaffinity(0))
    if pinned:
        os.sched_setaffinity(0, {available[rank % len(available)]})
    torch.set_num_threads(1)
    name = os.environ.get("BENCH_MPI", "")
    library = mpi.load(Path(os.environ["MPI4PY_LIBMPI"])) if name else None
    folder = Path(os.environ["BENCH_FOLDER"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {backend: _group(backend) for backend in backends}
    meeting = Meeting(folder / "meeting", rank, size)
    meeting.wait(patiently=True)  # Gloo still connects on others when this rank has its group, and may end it
    calm = Cores(meeting, folder, patience=patience)
    return Rank(rank, size, len(available), meeting, calm, groups, library, name, folder)


def leave(me: Rank, results: Results) -> None:
    """Save the results (rank 0) and end the groups together.

    Models must not outlive their groups: one that is the last to let go of a Gloo group waits for Gloo's
    threads while it holds the interpreter's lock, which one of them may want.
    """
    gc.collect()
    if me.rank == 0:
        nearest = me.calm.nearest_us
        results.notes["flag exchange between the cores"] = (
            "not measured" if nearest is None else f"{nearest:.3f} µs"
        )
        results.notes["blocks thrown away"] = f"{me.calm.thrown_away}, the cores were far apart or shared"
        results.save(me.folder / "results.json")
    me.meeting.wait()
    dist.destroy_process_group()


def _identity() -> tuple[int, int]:
    for rank, size in (("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("started without a rank: run `python -m benchmarks.NAME`, which starts the ranks")


def _group(backend: str) -> dist.ProcessGroup:
    if backend == "smddp":
        importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    if (
        backend == "fake"
    ):  # torch's own backend that does nothing: what is left is the cost of the call itself
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    return dist.new_group(backend=backend)
