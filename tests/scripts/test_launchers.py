"""The same two scripts, data parallelism and a split model, come to the same numbers under every launcher.

What can run here is started. Of the others, processes have exactly the variables that they
set, as forks of one that has imported torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.scripts.legacy import openmpi
from tests.scripts.test_smddp_scripts import BIN, environment, job, run
from tests.support import launchers
from tests.support.forks import ForkedProcess, as_main
from tests.support.launchers import BOTH, assert_trained, said
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT
from tests.support.slurm import SRUN, slurm

STARTED = {
    "smdrun": [str(BIN / "smdrun"), "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "MPICH": [str(BIN / "mpiexec"), "-n", "2", sys.executable],
    "Open MPI": [str(openmpi.MPIEXEC), "-n", "2", sys.executable],
}


@pytest.mark.parametrize("launcher", STARTED)
def test_both_scripts_train_under_launchers_that_run_here(launcher: str, tmp_path: Path) -> None:
    if launcher == "Open MPI" and not openmpi.LIBRARY.exists():
        pytest.skip("Open MPI is not installed: python -m tests.scripts.legacy.openmpi")
    env = openmpi.environment() if launcher == "Open MPI" else {}
    # smdrun's own interpreters start in other tests.
    done = (job if launcher == "smdrun" else run)([*STARTED[launcher], BOTH], cwd=tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(done.stdout, [2])
    found = said(done.stdout, "ddp")
    for place in found:
        assert place["LOCAL_RANK"] == place["SMDATAPARALLEL_LOCAL_RANK"] == str(place["rank"])
        assert (place["LOCAL_WORLD_SIZE"], place["SMDATAPARALLEL_USE_SINGLENODE"]) == ("2", "1")
    assert len({place["MASTER_PORT"] for place in found}) == 1


@contextlib.contextmanager
def forked(environments: Sequence[Mapping[str, str]], folder: Path) -> Iterator[list[ForkedProcess]]:
    """A process for each environment."""
    common = environment(OMP_NUM_THREADS="1")
    processes = [
        ForkedProcess(
            as_main,
            BOTH,
            [],
            cwd=folder,
            env={**common, **variables},
            stdout=folder / f"out-{number}",
            stderr=folder / f"err-{number}",
        )
        for number, variables in enumerate(environments)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def assert_train(environments: Sequence[Mapping[str, str]], local_sizes: Sequence[int], folder: Path) -> None:
    """Processes with these environments, on so many hosts, train both scripts."""
    hosts = [host for host, count in enumerate(local_sizes) for _ in range(count)]
    placed = [
        {**variables, "OPENSMD_HOST_ID": f"host {host}"}
        for variables, host in zip(environments, hosts, strict=True)
    ]
    with forked(placed, folder) as processes:
        codes = [process.wait(PATIENCE) for process in processes]
    errors = "".join((folder / f"err-{number}").read_text() for number in range(len(codes)))
    assert codes == [0] * len(codes), errors
    output = "".join((folder / f"out-{number}").read_text() for number in range(len(codes)))
    assert_trained(output, local_sizes)


@pytest.mark.parametrize(
    ("tasks", "pmi2"), [([2], False), ([1, 1], True)], ids=["one node", "two nodes, --mpi=pmi2"]
)
def test_both_scripts_train_as_a_step_of_slurm(tasks: list[int], pmi2: bool, tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}  # what a batch script may export
    assert_train(
        [{**task, **port} for task in launchers.srun(os.getpid(), tasks, pmi2=pmi2)], tasks, tmp_path
    )


@pytest.mark.parametrize("tasks", [[2], [1, 1]], ids=["one node", "two nodes"])
def test_both_scripts_train_under_srun_itself(tasks: list[int], tmp_path: Path) -> None:
    if not SRUN.exists():
        pytest.skip("Slurm is not here: python -m tests.support.slurm")
    # Nodes of one machine look like one host.
    script = f'OPENSMD_HOST_ID=$SLURMD_NODENAME exec "{sys.executable}" "{BOTH}"'
    options = [f"--nodes={len(tasks)}", f"--ntasks-per-node={tasks[0]}"]
    env = environment(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")  # the nodes' names do not resolve
    with slurm(tmp_path, env) as cluster:
        done = cluster.srun(options, ["sh", "-c", script], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(done.stdout, tasks)


def test_both_scripts_train_in_the_pods_of_a_pytorch_job(tmp_path: Path) -> None:
    assert_train(launchers.pytorch_job(2, free_port()), [1, 1], tmp_path)


def test_both_scripts_train_in_the_pods_of_a_train_job_without_torchrun(tmp_path: Path) -> None:
    assert_train(launchers.train_job(2, free_port()), [1, 1], tmp_path)


def test_both_scripts_train_in_containers_of_sagemaker_that_nothing_else_has_started(tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    assert_train([{**host, **port} for host in launchers.sagemaker(2)], [1, 1], tmp_path)


def test_both_scripts_train_as_ranks_of_open_mpi_on_two_hosts(tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    assert_train([{**host, **port} for host in launchers.open_mpi(2)], [1, 1], tmp_path)


PAGE = (ROOT / "docs" / "launchers.md").read_text()


def lines_of_shell(section: str) -> str:
    """What a section of the page has users run in a shell."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(r"```sh\n(.*?)```|\n(?:run: \|)\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1] or found[2]


@pytest.mark.parametrize(
    ("section", "hosts"),
    [
        (
            "SkyPilot",
            [
                {
                    "SKYPILOT_NUM_NODES": "2",
                    "SKYPILOT_NODE_RANK": rank,
                    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
                }
                for rank in "01"
            ],
        ),
        (
            "SageMaker",
            [{"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": host} for host in ("algo-1", "algo-2")],
        ),
    ],
)
def test_the_lines_of_the_page_start_smdrun_with_each_hosts_place(
    section: str, hosts: list[dict[str, str]], tmp_path: Path
) -> None:
    stub = tmp_path / "smdrun"
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    master = "10.0.0.4" if section == "SkyPilot" else "algo-1"
    for number, variables in enumerate(hosts):
        path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
        done = run(["sh", "-c", lines_of_shell(section)], cwd=tmp_path, PATH=path, **variables)
        assert done.stdout.split() == [
            *("--nnodes", "2", "--node-rank", str(number), "--master-addr", master, "train.py")
        ], done.stderr
