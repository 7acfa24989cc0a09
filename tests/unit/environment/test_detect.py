"""What each launcher's variables say, read without starting anything."""

from __future__ import annotations

import pytest

from opensmd.environment.detect import Launch, detect, expand_counts

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NUM_NODES": "3",
}
POD = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"}
CONTAINER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}

CASES = {
    "torchrun": (TORCHRUN, Launch("torchrun", 2, 4, 0, 2)),
    "Open MPI": (OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2)),
    "MPICH and Intel MPI": (HYDRA, Launch("MPI (PMI)", 1, 2, 1, 2)),
    "bare PMI": ({"PMI_RANK": "0", "PMI_SIZE": "3"}, Launch("MPI (PMI)", 0, 3, None, None)),
    "Cray PMI": (
        {"PMI_RANK": "4", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "4"},
        Launch("MPI (PMI)", 4, 8, 0, 4),
    ),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
        Launch("MVAPICH", 0, 2, 0, None),
    ),
    "srun": (SRUN, Launch("Slurm", 5, 6, 1, 2)),
    "srun on one node": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"},
        Launch("Slurm", 1, 2, 1, 2),
    ),
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}, Launch("Slurm", 5, 6, 1, 2)),
    "mpiexec over the nodes of a Slurm step": (
        {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "12", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        Launch("MPI (PMI)", 5, 12, 1, 4),
    ),
    "a pod of a TrainJob with a process each": (POD, Launch("Kubeflow Trainer", 1, 2, None, None)),
    "torchrun in such a pod": ({**POD, **TORCHRUN}, Launch("torchrun", 2, 4, 0, 2)),
    "a TrainJob of one pod": ({**POD, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, None),
    "a container of several": (CONTAINER, Launch("SageMaker", 1, 2, 0, 1)),
    "mpirun in containers": ({**CONTAINER, **OPEN_MPI}, Launch("Open MPI", 3, 4, 1, 2)),
    "a container alone": ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, None),
    "torchrun inside an MPI job": ({**HYDRA, **TORCHRUN}, Launch("torchrun", 2, 4, 0, 2)),
    "MPI inside a Slurm allocation": ({**SRUN, **OPEN_MPI}, Launch("Open MPI", 3, 4, 1, 2)),
    "rank and size by hand, rank 0 on this host": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        Launch("torchrun", 1, 2, None, None),
    ),
    "rank and size by hand, hosts unknown": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"},
        Launch("torchrun", 1, 2, None, None),
    ),
    "nothing": ({"HOME": "/root"}, None),
    "a rank without a size": ({"RANK": "0"}, None),
    "an empty variable": ({"RANK": "", "WORLD_SIZE": "2"}, None),
    "a Slurm batch script, which is no rank": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_launcher_is_recognised_by_its_variables(name: str) -> None:
    environ, expected = CASES[name]
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two'"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "rank 2 of 2 ranks (PMI_RANK, PMI_SIZE)"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},
            "SLURM_PROCID=3 says that this process is one rank of several, but SLURM_STEP_NUM_TASKS",
        ),
        ({**POD, "PET_NPROC_PER_NODE": "4"}, "PET_NNODES=2 and PET_NPROC_PER_NODE=4 ask torchrun"),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto ask torchrun"),
        ({**POD, "PET_NNODES": "1:2"}, "PET_NNODES=1:2 and"),
        ({**POD, "PET_NODE_RANK": "2"}, "needs PET_NODE_RANK, this host's number from 0 to 1; it is '2'"),
        (
            {**POD, "PET_NPROC_PER_NODE": "4", "RANK": "1", "WORLD_SIZE": "8"},
            "WORLD_SIZE=8 counts 4 processes in each of 2 pods",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        detect(environ)
    assert words in str(caught.value)


def test_all_ranks_on_one_host_are_told_from_ranks_on_several() -> None:
    assert Launch("x", 0, 2, 0, 2).on_one_host
    assert Launch("x", 0, 1, None, None).on_one_host
    assert not Launch("x", 0, 4, 0, 2).on_one_host
    assert not Launch("x", 0, 4, None, None).on_one_host


@pytest.mark.parametrize(("text", "counts"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1])])
def test_slurm_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts
