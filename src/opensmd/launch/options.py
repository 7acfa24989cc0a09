"""The options of ``smdrun``, checked, with the defaults that depend on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opensmd.cpus import cores_at_once, cpu_quota
from opensmd.environment.sagemaker import JSON, parse_mp_parameters
from opensmd.launch import affinity

__all__ = ["Options", "gpu_count"]

MOST_RANKS = 8  # without GPUs and -n: as many as on a SageMaker host


@dataclass(frozen=True)
class Options:
    """The checked options of ``smdrun``."""

    script: str
    args: Sequence[str] = ()
    ranks: int = 1
    module: bool = False
    python: bool = True
    log_dir: Path | None = None
    device: str = "auto"
    bind: bool = True
    prefix: bool = True
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    max_restarts: int = 0
    elastic_replicas: int | None = None
    output: Path = Path("output")
    channels: dict[str, Path] = field(default_factory=dict)
    mp_parameters: dict[str, JSON] = field(default_factory=dict)
    dataparallel: bool = False
    timeline: Path | None = None
    records: Path | None = None

    @classmethod
    def from_command_line(
        cls,
        *,
        ranks: int | None,
        channel: Sequence[str],
        mp_parameters: str | None,
        standalone: bool,
        **rest: Any,
    ) -> Options:
        """Check the command line's values and fill in the defaults that depend on the machine.

        Raises:
            ValueError: a value cannot be used; the text says which and what was expected.
        """
        if standalone and rest["nnodes"] > 1:
            raise ValueError(f"--standalone is a job on one host, and there are --nnodes {rest['nnodes']}")
        if rest["nnodes"] > 1 and not rest["master_addr"]:
            raise ValueError(f"--nnodes {rest['nnodes']} needs --master-addr, the address of host 0")
        if rest["node_rank"] >= rest["nnodes"]:
            raise ValueError(f"--node-rank {rest['node_rank']} is outside 0..{rest['nnodes'] - 1}")
        if not rest["python"] and (rest["module"] or rest["device"] == "cpu"):
            raise ValueError("--no-python runs a program as it is: -m and --device cpu are for Python alone")
        count = ranks or default_ranks(rest["device"])
        _check_replicas(rest["elastic_replicas"], count, rest["nnodes"])
        channels = {}
        for pair in channel:
            name, equals, path = pair.partition("=")
            if not equals:
                raise ValueError(f"--channel {pair!r}: expected NAME=PATH, for example training=data/train")
            channels[name] = Path(path)
        parameters = parse_mp_parameters(mp_parameters) if mp_parameters else {}
        return cls(ranks=count, channels=channels, mp_parameters=parameters, **rest)


def _check_replicas(replicas: int | None, ranks: int, nnodes: int) -> None:
    """Raise if the ranks cannot be split into so many elastic replicas."""
    if replicas is None:
        return
    if replicas % nnodes:
        raise ValueError(
            f"--elastic-replicas {replicas}: each of the {nnodes} hosts must have as many whole replicas"
        )
    if ranks % (replicas // nnodes):
        raise ValueError(f"--elastic-replicas {replicas}: the {ranks} ranks cannot be shared out evenly")


def default_ranks(device: str) -> int:
    """Return one rank per GPU; without GPUs, one per physical core that may be used at once, at most 8."""
    at_once = cores_at_once(affinity.local_cores(), cpu_quota())
    return gpu_count(device) or min(MOST_RANKS, at_once)


def gpu_count(device: str) -> int:
    """Return how many GPUs the ranks may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()
