"""Where the ranks meet: a master address and port that every rank derives independently and identically.

Bare MPI tells a process its rank and size but no address. On one host, the address is the loopback; the port
must be the same on all ranks, and different for another job at the same time. All ranks of a job on one host
descend from one launcher process (``hydra_pmi_proxy``, ``mpirun``, ``slurmstepd`` ...), whose process id no
other living job shares. The port is that id folded into a range below the kernel's ephemeral ports, so two
jobs collide only if their ids differ by an exact multiple of the range.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from opensmd.environment.detect import Launch
from opensmd.environment.hosts import hosts_of_container
from opensmd.environment.numbers import number

__all__ = ["TORCH_PORT", "ancestors", "fold", "is_free", "master_address", "master_port"]

FIRST_PORT = 20000
PORTS = 32768 - FIRST_PORT  # Linux hands out ephemeral ports from 32768 upwards
TORCH_PORT = 29500  # torchrun's default on several hosts
SAGEMAKER_PORT = 7777  # what a SageMaker container sets
LAUNCHERS = (
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpiexec",
    "mpirun",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "slurmstepd",
    "srun",
    "palsd",
)
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")


def ancestors(pid: int | str = "self") -> list[tuple[int, str]]:
    """Return the process id and command name of every ancestor, parent first, as far as /proc shows them."""
    processes: list[tuple[int, str]] = []
    while True:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            name = Path(f"/proc/{parent}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return processes
        processes.append((parent, name))
        pid = parent


def master_address(launch: Launch | None, environ: Mapping[str, str]) -> str | None:
    """Return the host of rank 0: loopback on one host, else the launcher's information; None if unknown."""
    if launch is None or launch.on_one_host:
        return "127.0.0.1"
    if launch.launcher == "Slurm":
        return first_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))
    if launch.launcher == "Kubeflow Trainer":
        return environ.get("PET_MASTER_ADDR") or None
    hosts = hosts_of_container(environ)
    return hosts[0] if hosts else None


def master_port(
    launch: Launch | None, environ: Mapping[str, str], parents: Sequence[tuple[int, str]], own_pid: int
) -> int:
    """Return the port, which every rank of this job derives alike."""
    if launch is None:
        return fold(own_pid)
    if launch.on_one_host:
        for pid, name in parents:
            if name.startswith(LAUNCHERS):
                return fold(pid)
    elif launch.launcher == "Kubeflow Trainer":
        return number(environ, ("PET_MASTER_PORT",)) or TORCH_PORT
    elif environ.get("SM_HOSTS"):
        return SAGEMAKER_PORT
    job = [environ[name] for name in _JOB_NAMES if environ.get(name)]
    if job:
        step = environ.get("SLURM_STEP_ID", "")
        return fold(zlib.crc32("/".join([*job, step]).encode()))
    return fold(parents[0][0] if parents else 0)


def fold(number: int) -> int:
    """Fold a number into the range of ports."""
    return FIRST_PORT + number % PORTS


def first_host(nodelist: str) -> str | None:
    """Return the first host of a Slurm node list: ``"gpu[07-09,12],cpu1"`` gives ``"gpu07"``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        return None
    return match[1] + (match[2] or "") + match[3]


def is_free(port: int) -> bool:
    """Whether a server could listen on the loopback's ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
