"""Which of a job's hosts this is, if one process was started on each, but no ranks.

Kubeflow's operators give pods torchrun's options as variables (``PET_NNODES`` is ``--nnodes``); a SageMaker
container lists the job's hosts. A script that nothing else starts is then the only rank of its host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from opensmd.environment.numbers import number

__all__ = [
    "Place",
    "check_processes_were_started",
    "hosts_of_container",
    "place_of_container",
    "place_of_pod",
]


@dataclass(frozen=True)
class Place:
    """The number of this host, from 0, and the number of hosts."""

    host: int
    hosts: int


def hosts_of_container(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts that a SageMaker container lists; empty if there is none, or no list."""
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    except ValueError:
        return []
    return hosts if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts) else []


def place_of_container(environ: Mapping[str, str]) -> Place | None:
    """Return the place of a SageMaker container among several; None for one host, or outside a container."""
    hosts = hosts_of_container(environ)
    current = environ.get("SM_CURRENT_HOST")
    if len(hosts) < 2 or current not in hosts:
        return None
    return Place(hosts.index(current), len(hosts))


def place_of_pod(environ: Mapping[str, str]) -> Place | None:
    """Return the place of a TrainJob's pod if each pod runs one process; None for one host, or otherwise.

    Raises:
        ValueError: torchrun should have started several processes in each pod, but has not.
    """
    count = environ.get("PET_NNODES", "")
    if count in ("", "1", "1:1"):
        return None
    processes = environ.get("PET_NPROC_PER_NODE") or "1"
    if processes != "1" or not count.isdecimal():
        raise ValueError(
            f"PET_NNODES={count} and PET_NPROC_PER_NODE={processes} ask torchrun for this job's "
            "processes, and it has not started this one. Let the pods run `torchrun train.py` or "
            "`smdrun train.py`, or one process each: numProcPerNode: 1."
        )
    host = number(environ, ("PET_NODE_RANK",))
    if host is None or not 0 <= host < int(count):
        raise ValueError(
            f"PET_NNODES={count} needs PET_NODE_RANK, this host's number from 0 to {int(count) - 1}; it is "
            f"{environ.get('PET_NODE_RANK')!r}. Set it, or start the script with torchrun or smdrun."
        )
    return Place(host, int(count))


def check_processes_were_started(environ: Mapping[str, str], rank: int, size: int) -> None:
    """Check that this is the only process in a PyTorchJob's pod, which counts all processes of the job.

    Raises:
        ValueError: its variables count processes that torchrun should have started there.
    """
    processes, hosts = environ.get("PET_NPROC_PER_NODE", ""), environ.get("PET_NNODES", "")
    if not processes.isdecimal() or int(processes) < 2 or not hosts.isdecimal():
        return
    if size == int(hosts) * int(processes) and environ.get("PET_NODE_RANK") == str(rank):
        raise ValueError(
            f"WORLD_SIZE={size} counts {processes} processes in each of {hosts} pods (PET_NPROC_PER_NODE, "
            "PET_NNODES), and RANK numbers the pods. Start the script with torchrun or smdrun, or set "
            "nprocPerNode: 1."
        )
