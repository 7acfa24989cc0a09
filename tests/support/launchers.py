"""What every launcher must lead to, and what those that cannot run here leave in a process's environment.

That is all of it, and nothing else, as documented: srun's manual ("output environment variables"), Kubeflow's
pages on PyTorchJob and on Trainer v2, SageMaker's training toolkit, Open MPI's for a job on several hosts.
The name of the first host is this machine's own, which resolves wherever tests run.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from tests.scripts.launchers.training import expected
from tests.support.ranks import ROOT

__all__ = [
    "BOTH",
    "SCRIPTS",
    "Environment",
    "assert_trained",
    "open_mpi",
    "pytorch_job",
    "sagemaker",
    "said",
    "srun",
    "train_job",
]

Environment = dict[str, str]

SCRIPTS = ROOT / "tests" / "scripts" / "launchers"
BOTH = str(SCRIPTS / "both.py")


def said(output: str, script: str) -> list[dict[str, Any]]:
    """What each rank said of one script, by rank."""
    results = [json.loads(text) for text in re.findall(rf"{script} (\{{.*?\}})", output)]
    return sorted(results, key=lambda place: place["rank"])


def assert_trained(output: str, local_sizes: Sequence[int]) -> None:
    """All ranks came to the losses of one process and know who shares their host."""
    size = sum(local_sizes)
    places = [(local, count) for count in local_sizes for local in range(count)]
    for script in ("ddp", "split"):
        found = said(output, script)
        assert [(place["rank"], place["size"]) for place in found] == [(rank, size) for rank in range(size)]
        for place in found:
            assert place["losses"] == pytest.approx(expected(), rel=1e-5), script
    assert [(place["local_rank"], place["local_size"]) for place in said(output, "split")] == places


def srun(job: int, tasks: Sequence[int], *, pmi2: bool = False) -> list[Environment]:
    """A step of a Slurm job.

    Args:
        job: its number.
        tasks: how many a node.
        pmi2: with srun's support for MPI, ``--mpi=pmi2``.
    """
    nodes = [socket.gethostname(), *(f"node{number}" for number in range(1, len(tasks)))]
    size, names = sum(tasks), ",".join(nodes)
    counts = ",".join(map(str, tasks))
    environments = []
    for rank, (node, local) in enumerate((n, i) for n, count in enumerate(tasks) for i in range(count)):
        of_job = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOBID": str(job),
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": names,
            "SLURM_NODELIST": names,
            "SLURM_JOB_NUM_NODES": str(len(tasks)),
            "SLURM_NNODES": str(len(tasks)),
            "SLURM_NTASKS": str(size),
            "SLURM_NPROCS": str(size),
            "SLURM_TASKS_PER_NODE": counts,
            "SLURM_JOB_CPUS_PER_NODE": counts,
            "SLURM_CPUS_ON_NODE": str(tasks[node]),
            "SLURM_SUBMIT_HOST": "login",
            "SLURM_SUBMIT_DIR": "/home/me",
        }
        of_step = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEPID": "0",
            "SLURM_STEP_NODELIST": names,
            "SLURM_STEP_NUM_NODES": str(len(tasks)),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": counts,
            "SLURM_STEP_LAUNCHER_PORT": "41234",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_SRUN_COMM_HOST": "127.0.0.1",
            "SLURM_SRUN_COMM_PORT": "41234",
        }
        first = sum(tasks[:node])
        of_task = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_GTIDS": ",".join(map(str, range(first, first + tasks[node]))),
            "SLURM_TASK_PID": str(1000 + rank),
            "SLURMD_NODENAME": nodes[node],
        }
        mpi = {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_JOBID": f"{job}.0", "PMI_FD": "17"}
        environments.append({**of_job, **of_step, **of_task, **(mpi if pmi2 else {})})
    return environments


def pytorch_job(pods: int, port: int) -> list[Environment]:
    """Kubeflow's PyTorchJob: one master, whose service has its name, and workers; a process a pod."""
    torchrun = {
        "PET_MASTER_ADDR": socket.gethostname(),
        "PET_MASTER_PORT": str(port),
        "PET_NNODES": str(pods),
    }
    return [
        {
            **torchrun,
            **_pod(f"train-{'worker' if pod else 'master'}-{max(pod - 1, 0)}"),
            "PET_NODE_RANK": str(pod),
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": socket.gethostname(),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(pods),
            "RANK": str(pod),
        }
        for pod in range(pods)
    ]


def train_job(pods: int, port: int, processes: str = "1") -> list[Environment]:
    """Kubeflow Trainer v2 with ``numProcPerNode: 1``: torchrun's options, and nothing that says RANK."""
    return [
        {
            **_pod(f"train-node-0-{pod}"),
            "JOB_COMPLETION_INDEX": str(pod),
            "PET_NNODES": str(pods),
            "PET_NPROC_PER_NODE": processes,
            "PET_NODE_RANK": str(pod),
            "PET_MASTER_ADDR": socket.gethostname(),
            "PET_MASTER_PORT": str(port),
        }
        for pod in range(pods)
    ]


def sagemaker(hosts: int) -> list[Environment]:
    """A SageMaker container on each of several instances, without a distribution: a process an instance."""
    names = [socket.gethostname(), *(f"algo-{number}" for number in range(2, hosts + 1))]
    shared = {
        "SM_HOSTS": json.dumps(names),
        "SM_CURRENT_INSTANCE_TYPE": "ml.c5.xlarge",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_NUM_GPUS": "0",
        "SM_NUM_CPUS": "4",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_CHANNELS": "[]",
        "SM_HPS": "{}",
        "SM_USER_ENTRY_POINT": "both.py",
        "SM_FRAMEWORK_PARAMS": "{}",
    }
    return [
        {**shared, "SM_CURRENT_HOST": name, "SM_TRAINING_ENV": json.dumps({"current_host": name})}
        for name in names
    ]


def open_mpi(hosts: int) -> list[Environment]:
    """Open MPI's mpirun over several hosts, a rank each; ``-x MASTER_ADDR`` says where rank 0 is."""
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(host),
            "OMPI_COMM_WORLD_SIZE": str(hosts),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_COMM_WORLD_NODE_RANK": "0",
            "OMPI_UNIVERSE_SIZE": str(hosts),
            "PMIX_RANK": str(host),
            "PMIX_NAMESPACE": "prterun-login-77@1",
            "MASTER_ADDR": socket.gethostname(),
        }
        for host in range(hosts)
    ]


def _pod(name: str) -> Environment:
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": name}
