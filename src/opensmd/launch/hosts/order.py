"""What a host is asked to run, sent through ssh's input so that no process list shows it.

It includes the job's secret, and variables that the user has set for this package, for torch and for the
libraries below it, but none that describe only this machine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from opensmd.environment import job_secret
from opensmd.environment.variables import NOTE
from opensmd.timeline.recorder import VARIABLE as TIMELINE

__all__ = ["Order", "command_line", "forwarded"]

_PREFIXES = (
    "OPENSMD_",
    "SMDRUN_",
    "SMP_",
    "SMDDP_",
    "SMDATAPARALLEL_",
    "GLOO_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
)
_PREFIXES_BELOW = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "MALLOC_",
    "HF_",
    "TRANSFORMERS_",
    "WANDB_",
    "CUDA_VISIBLE_",
)
_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH", "DDP_DISABLE_COMM_MEM", "PYTHONHASHSEED")
# About this process, or the command line for several hosts.
_OWN = re.compile(
    r"SMDRUN_(HOSTS|HOSTFILE|SSH|NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|RANKS|PID|JOB|STORE|BUILD_ERROR)$"
)
_NOT_FORWARDED = {NOTE, job_secret.FILE, job_secret.OF_LAUNCHER, TIMELINE}


@dataclass(frozen=True)
class Order:
    """One host's part of a job.

    Attributes:
        folder: the working directory.
        variables: for the host's environment.
        arguments: of the host's smdrun.
    """

    folder: str
    variables: dict[str, str]
    arguments: list[str]

    def to_line(self) -> bytes:
        """Return the order as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """Parse a line from :meth:`to_line`."""
        return cls(**json.loads(line))


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is valid on other hosts."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith((*_PREFIXES, *_PREFIXES_BELOW)))
        and name not in _NOT_FORWARDED
        and not _OWN.match(name)
    }


def command_line(
    python: str, folder: str, environ: Mapping[str, str], module: str = "opensmd.launch.hosts.member"
) -> str:
    """Return what a host's shell runs: by default, what reads the order from its input. Never secret."""
    path = environ.get("PYTHONPATH", "")
    variable = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return f"cd {shlex.quote(folder)} && {variable}exec {shlex.quote(python)} -m {module}"
