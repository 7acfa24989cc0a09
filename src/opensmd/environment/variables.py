"""Filling the environment, so that torch.distributed finds what ``env://`` needs, whatever the launcher.

Importing ``smdistributed.dataparallel.torch`` calls :func:`fill`. It adds RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and what a SageMaker container tells a rank, from the variables of
torchrun, Open MPI, MPICH, Intel MPI, MVAPICH, Slurm, Kubeflow or SageMaker. A process started by hand becomes
a group of one, without a LOCAL_RANK, which frameworks that start their ranks themselves take as a sign that
this has happened. Existing values never change. What was added is noted in one variable, so that what such a
process starts (``subprocess.run(["mpiexec", ...])``) is not mistaken for a member of its group.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opensmd.environment.detect import Launch, detect
from opensmd.environment.loopback import LOOPBACK_NAMES
from opensmd.environment.master import TORCH_PORT, ancestors, fold, is_free, master_address, master_port

__all__ = [
    "NOTE",
    "Filling",
    "chosen_port",
    "current_launch",
    "fill",
    "local_rank_is_assumed",
    "plan",
    "rank_variables",
]

SERVER_PORT = "7592"  # the port that a container tells its scripts, some of which count up from it
_CONTAINER = ("SM_HOSTS", "SM_TRAINING_ENV")  # with any of these, a SageMaker container runs the script
_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOTE = "OPENSMD_FILLED"  # JSON: {"pid": who filled, "set": {name: value}}


@dataclass(frozen=True)
class Filling:
    """What :func:`plan` would add to an environment, and its warnings."""

    launch: Launch | None
    variables: dict[str, str]
    problems: list[str] = field(default_factory=list)


def current_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what launched this process, whatever :func:`fill` added; None if it was started by hand."""
    environ = os.environ if environ is None else environ
    return detect(_as_launched(environ))


def local_rank_is_assumed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether LOCAL_RANK was only assumed by :func:`fill`: for a group of one, or for ranks on one host."""
    environ = os.environ if environ is None else environ
    added = _note(environ)["set"].get("LOCAL_RANK")
    launch = current_launch(environ)
    is_given = launch is not None and launch.local_rank is not None
    return added is not None and added == environ.get("LOCAL_RANK") and not is_given


def chosen_port(environ: Mapping[str, str] | None = None) -> str | None:
    """Return MASTER_PORT if :func:`fill` has chosen it, here or in a parent process; else None."""
    environ = os.environ if environ is None else environ
    port = environ.get("MASTER_PORT")
    return port if port == _note(environ)["set"].get("MASTER_PORT") else None


def fill(environ: MutableMapping[str, str] | None = None) -> Launch | None:
    """Add what is missing to ``environ`` (default ``os.environ``); return what launched this process.

    Warns:
        UserWarning: the ranks run on several hosts and rank 0's host is unknown, or the derived port is
            taken.
    """
    environ = os.environ if environ is None else environ
    filling = plan(environ, ancestors(), os.getpid())
    note = _note(environ)
    replaceable = _replaceable(note, environ) if filling.launch is not None else {}
    added = {
        name: value
        for name, value in filling.variables.items()
        if name not in environ or environ[name] == replaceable.get(name)
    }
    for name in set(replaceable) - set(filling.variables) - set(_as_launched(environ)):
        if environ.get(name) == replaceable[name]:
            del environ[name]  # it described this process's place in another group
    if not added:
        return filling.launch
    for problem in [*filling.problems, *_port_problem(filling, added)]:
        warnings.warn(problem, UserWarning, stacklevel=2)
    environ.update(added)
    environ[NOTE] = json.dumps({"pid": os.getpid(), "set": {**note["set"], **added}})
    return filling.launch


def plan(environ: Mapping[str, str], parents: Sequence[tuple[int, str]], own_pid: int) -> Filling:
    """Return what a process with this environment, these ancestors and this id needs; pure."""
    as_launched = _as_launched(environ)
    launch = detect(as_launched)
    address = master_address(launch, as_launched)
    variables = _own_place(launch, as_launched)
    if launch is not None and not launch.on_one_host and (address or as_launched.get("MASTER_ADDR")):
        variables["SMDATAPARALLEL_SERVER_ADDR"] = as_launched.get("MASTER_ADDR") or str(address)
        variables["SMDATAPARALLEL_SERVER_PORT"] = SERVER_PORT
    if address is not None:
        variables["MASTER_ADDR"] = address
        variables["MASTER_PORT"] = str(master_port(launch, as_launched, parents, own_pid))
        return Filling(launch, variables, [])
    if "MASTER_ADDR" in as_launched:
        variables["MASTER_PORT"] = str(TORCH_PORT)
        return Filling(launch, variables, [])
    return Filling(launch, variables, _problems_without_master(launch))


def _own_place(launch: Launch | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a script its place, unless they contradict given ones."""
    variables = rank_variables(launch or Launch("none", 0, 1, 0, 1))
    if launch is not None:
        if launch.local_rank is None and environ.get("MASTER_ADDR") in (*LOOPBACK_NAMES, "::1"):
            # The ranks may be on several hosts, but this is rank 0's host.
            variables["LOCAL_RANK"] = variables["SMDATAPARALLEL_LOCAL_RANK"] = str(launch.rank)
        return variables
    if any(environ.get(name, variables[name]) != variables[name] for name in _GROUP[:2]):
        # An incomplete place: torch says which variable is missing, instead of waiting as rank 0 for rank 1.
        variables = {name: variable for name, variable in variables.items() if name not in _GROUP}
    if not any(name in environ for name in _CONTAINER):
        variables.pop("LOCAL_RANK")
    return variables


def _problems_without_master(launch: Launch | None) -> list[str]:
    """Return the warning that rank 0's host is unknown; one rank gives it, and torchrun gives its own."""
    if launch is None or launch.launcher == "torchrun" or launch.rank != 0:
        return []
    return [
        f"{launch.launcher} started {launch.size} ranks on several hosts, and nothing tells where rank 0 "
        "is. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port "
        "there, for example: mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 ... (Open MPI) or "
        "mpiexec -genv MASTER_ADDR host1 -genv MASTER_PORT 29500 ... (MPICH, Intel MPI)."
    ]


def rank_variables(launch: Launch) -> dict[str, str]:
    """Return the variables that tell a script its place, under torch's and SageMaker's names."""
    variables = {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.size)}
    if launch.local_rank is not None:
        variables["LOCAL_RANK"] = str(launch.local_rank)
        variables["SMDATAPARALLEL_LOCAL_RANK"] = str(launch.local_rank)
    if launch.local_size is not None:
        variables["LOCAL_WORLD_SIZE"] = str(launch.local_size)
    hosts = "SINGLENODE" if launch.on_one_host else "HOMOGENEOUS"
    variables[f"SMDATAPARALLEL_USE_{hosts}"] = "1"
    return variables


def _note(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read which process added variables, and their values: ``{"pid": ..., "set": {name: value}}``."""
    note: dict[str, Any] = json.loads(environ[NOTE]) if environ.get(NOTE) else {"pid": None, "set": {}}
    return note


def _replaceable(note: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return which of the values that :func:`fill` added are not valid for a launched process."""
    inherited, overruled = note["pid"] != os.getpid(), _overruled(note, environ)
    if (
        inherited and overruled
    ):  # by a parent that creates its own ranks, and has left them its rendezvous address
        return {name: value for name, value in note["set"].items() if not name.startswith("MASTER_")}
    return dict(note["set"]) if inherited or overruled else {}


def _overruled(note: dict[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether rank or size were set after :func:`fill` added them, so that none of it counts any more."""
    return any(environ.get(name) != note["set"].get(name) for name in _GROUP[:2])


def _as_launched(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what :func:`fill` added, here or in a parent process."""
    note = _note(environ)
    kept = _GROUP if _overruled(note, environ) else ()
    return {name: value for name, value in environ.items() if name in kept or note["set"].get(name) != value}


def _port_problem(filling: Filling, added: dict[str, str]) -> list[str]:
    """Check on rank 0 whether the derived port is free; a lone process takes the next free one."""
    if "MASTER_PORT" not in added or filling.variables.get("RANK", "0") != "0":
        return []
    port = int(added["MASTER_PORT"])
    if filling.launch is None:
        while not is_free(port):
            port = fold(port + 1)
        added["MASTER_PORT"] = str(port)
        return []
    if not filling.launch.on_one_host or is_free(port):
        return []
    return [
        f"port {port}, on which the {filling.launch.size} ranks of this job were to meet, is taken by "
        "another program. Set MASTER_PORT to a free port for all ranks, for example: "
        "mpiexec -genv MASTER_PORT 29500."
    ]
