"""What a host needs before its ranks start.

In this order: addresses, threads and memory; the native core, built once for all ranks; the variables of a
SageMaker container.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import sys
from pathlib import Path

from opensmd.cpus import allowed_cpus, cores_at_once, cpu_quota
from opensmd.environment.job_secret import OF_LAUNCHER
from opensmd.environment.sagemaker import Job, job_variables
from opensmd.environment.settings import Settings, misspelt
from opensmd.first_line import first_line
from opensmd.launch import affinity, allocator
from opensmd.launch.options import Options, gpu_count
from opensmd.launch.rank import LAUNCHER

__all__ = ["prepare"]

AGENT_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def prepare(options: Options) -> None:
    """Set up threads, memory, the native core and the variables that every rank inherits."""
    for name, meant in misspelt(os.environ).items():
        print(f"smdrun: {name} has no effect; did you mean {meant}?", file=sys.stderr)
    os.environ.pop(OF_LAUNCHER, None)  # from an enclosing smdrun
    if options.nnodes == 1:
        from opensmd.collectives.stores.listening import keep_on_loopback

        keep_on_loopback()
        os.environ[OF_LAUNCHER] = secrets.token_hex(32)
    elif options.master_addr:
        from opensmd.launch.interface import choose_towards

        choose_towards(options.master_addr, options.master_port)
    cores = affinity.local_cores()
    if crowding := affinity.crowding(cores, options.ranks):
        print(f"smdrun: {crowding}", file=sys.stderr)
    at_once = cores_at_once(cores, cpu_quota())
    threads = affinity.threads_per_rank(at_once, options.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.update(allocator.keeping_memory(os.environ))
    _build_once()
    for name, value in job_variables(_job(options)).items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())
    for name in AGENT_LOGGERS:  # the console says it better
        importlib.import_module(name)  # sets the level on import
        logging.getLogger(name).setLevel(logging.CRITICAL)
    socket.getfqdn = _own_name


def _own_name(name: str = "") -> str:
    """Return the name of this host for torch's agent, which uses it in events that nobody reads.

    The agent itself would ask the resolver, which refuses names that DNS cannot have (of 64 characters, for
    example) and is slow if no server answers.
    """
    return name or socket.gethostname()


def _job(options: Options) -> Job:
    """Return what a container tells a script about the job."""
    hosts = _host_names(options.nnodes)
    return Job(
        script=Path(options.script),
        args=options.args,
        output=options.output,
        host=hosts[options.node_rank],
        hosts=hosts,
        cpus=len(allowed_cpus()),
        gpus=options.ranks if options.device == "cpu" else gpu_count(options.device),
        ranks_per_host=options.ranks,
        channels=options.channels,
        mp_parameters=options.mp_parameters,
        dataparallel=options.dataparallel,
    )


def _host_names(count: int) -> list[str]:
    """Return this host's name; several hosts do not know each other's, and get those of a container."""
    return [socket.gethostname()] if count == 1 else [f"algo-{number}" for number in range(1, count + 1)]


def _build_once() -> None:
    """Build the native core before the ranks start; if that fails, say in one line that they use Gloo."""
    from opensmd.native.build import BuildError, build
    from opensmd.native.prebuilt import is_prebuilt

    os.environ.pop("SMDRUN_BUILD_ERROR", None)  # from an enclosing smdrun
    if not Settings.from_environment().native:
        return
    try:
        library = build()
        if not is_prebuilt(library):  # tell the ranks where it is, perhaps in a fallback folder
            os.environ["OPENSMD_CACHE_DIR"] = str(library.parent.parent)
    except BuildError as error:
        print(f"smdrun: {error}\nsmdrun: groups of the smddp backend will run over Gloo.", file=sys.stderr)
        os.environ["SMDRUN_BUILD_ERROR"] = first_line(error)
