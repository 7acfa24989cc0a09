"""What a host is asked to run, as it travels to it: in the input of ssh, where no list of processes shows it.

A job's secret is among it. What a user has set for this package, for torch and for the libraries below it
goes along; what describes this machine alone does not.
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
# Of this very process, or of the command line that asks for several hosts.
_OWN = re.compile(
    r"SMDRUN_(HOSTS|HOSTFILE|SSH|NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|RANKS|PID|JOB|STORE|BUILD_ERROR)$"
)
_NOT_FORWARDED = {NOTE, job_secret.FILE, job_secret.OF_LAUNCHER, TIMELINE}


@dataclass(frozen=True)
class Order:
    """One host's part of a job.

    Attributes:
        folder: to work in.
        variables: for its environment.
        arguments: of its smdrun.
    """

    folder: str
    variables: dict[str, str]
    arguments: list[str]

    def to_line(self) -> bytes:
        """The order as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """What :meth:`to_line` made."""
        return cls(**json.loads(line))


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that holds on other hosts, too."""
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
    """What a host's shell runs; the default reads the order from its input. Nothing secret stands there."""
    path = environ.get("PYTHONPATH", "")
    found = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return f"cd {shlex.quote(folder)} && {found}exec {shlex.quote(python)} -m {module}"
