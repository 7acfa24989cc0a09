"""Who started this process: pure reading of the variables that launchers leave in the environment.

A launcher is recognised by its variables for rank and size, both of which must be there. The first complete
pair in the table wins, so a ``torchrun`` inside an MPI job counts as ``torchrun``. If nothing has started
ranks, but one process was started on each of several hosts (``hosts``), those are the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opensmd.environment import hosts
from opensmd.environment.numbers import number

__all__ = ["Launch", "detect"]


@dataclass(frozen=True)
class Launch:
    """What a launcher has said about this process.

    ``local_rank`` and ``local_size`` are None if the launcher does not say.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to run on this host."""
        return self.size == 1 or self.local_size == self.size


@dataclass(frozen=True)
class _Names:
    """The variable names of one launcher, in order of preference."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# SLURM_PROCID and SLURM_NTASKS are also set in the batch script, which is not a rank; only a step started by
# srun has SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (
    _Names("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Names(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "MPI (PMI)",
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "PMIX_SIZE"),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "PMIX_LOCAL_SIZE"),
    ),
    _Names("Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",), ()),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return what this process's launcher says, or None for a process started by hand.

    Raises:
        ValueError: a variable is not a number, a rank is outside its group, or the variables say that there
            are other ranks, but not how many, or that a launcher should have started them, but has not.
    """
    for names in _LAUNCHERS:
        rank, size = number(environ, names.rank), number(environ, names.size)
        if rank is None or size is None or _is_a_step_of_slurm(names, rank, size, environ):
            continue
        local_rank, local_size = number(environ, names.local_rank), number(environ, names.local_size)
        if names.launcher == "Slurm":
            local_size = _slurm_local_size(environ, size)
        if names.launcher == "torchrun" and local_rank is None:
            hosts.check_processes_were_started(environ, rank, size)
            # by hand; MASTER_ADDR may say that rank 0 is on this host, but nothing about the others
            local_rank = 0 if size == 1 else None
        _check(names, rank, size)
        return Launch(names.launcher, rank, size, local_rank, local_size)
    _check_no_rank_of_slurm(environ)
    return _process_of_a_host(environ)


def _process_of_a_host(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch of one process on each of several hosts, whose rank follows from the host's place."""
    place = hosts.place_of_container(environ)
    if place is not None:
        return Launch("SageMaker", place.host, place.hosts, 0, 1)
    place = hosts.place_of_pod(environ)
    return None if place is None else Launch("Kubeflow Trainer", place.host, place.hosts, None, None)


def _is_a_step_of_slurm(names: _Names, rank: int, size: int, environ: Mapping[str, str]) -> bool:
    """Whether srun has started this rank with MPI support on, in which case its own variables say more."""
    if names.launcher != "MPI (PMI)":
        return False
    step = number(environ, ("SLURM_PROCID",)), number(environ, ("SLURM_STEP_NUM_TASKS",))
    return step == (rank, size)


def _check(names: _Names, rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"the variables of {names.launcher} say rank {rank} of {size} ranks "
            f"({names.rank[0]}, {names.size[0]}); a rank from 0 to {max(size, 1) - 1} was expected. "
            "Unset both or correct them."
        )


def _check_no_rank_of_slurm(environ: Mapping[str, str]) -> None:
    """Raise for other ranks than 0; 0 may be a batch script's own process, where SLURM_PROCID is 0, too."""
    rank = number(environ, ("SLURM_PROCID",))
    if rank:
        raise ValueError(
            f"SLURM_PROCID={rank} says that this process is one rank of several, but SLURM_STEP_NUM_TASKS, "
            "which srun sets beside it, is not there. Start the script with srun and pass all of Slurm's "
            "variables on (into containers, too), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for "
            "every rank, for example RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS."
        )


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int | None:
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1":
        return size
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's run-length counts: ``"2(x3),1"`` gives ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        value, _, times = part.partition("(x")
        counts += [int(value)] * (int(times.rstrip(")")) if times else 1)
    return counts
