"""One job: prepare the host, hand the ranks to torch's elastic agent, show what they say, end what is left.

Steps: 1. threads, cores and memory; 2. build the native core, once for all ranks; 3. the variables of a
SageMaker container; 4. the agent starts ``opensmd.launch.rank`` for each rank and watches it; 5. when a rank
fails or a signal comes, every process that the job has left is ended, also those whose parents are dead.
A guardian does that, and removes what the job needs in the file system, where smdrun itself is killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensmd.environment.job_secret import OF_LAUNCHER, SecretError
from opensmd.environment.sagemaker import JSON, Job, job_variables, parse_mp_parameters
from opensmd.launch import affinity, allocator, signals
from opensmd.launch.leftovers import orphans
from opensmd.launch.leftovers.guardian import Guardian, job_folder
from opensmd.launch.output import reports
from opensmd.launch.output.console import Console
from opensmd.launch.output.explanation import FAILED_ELSEWHERE, explain
from opensmd.launch.output.log_files import LogFiles
from opensmd.launch.rank import LAUNCHER

if TYPE_CHECKING:  # torch is imported once there is something to launch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from opensmd.launch.output.logs import RankLogs
    from opensmd.launch.stores.other_hosts import OtherHosts

__all__ = ["Options", "run"]

MOST_RANKS = 8  # without GPUs and without -n: as many as a SageMaker host has
SHUTDOWN = 10  # seconds that ranks have between SIGTERM or Ctrl-C and SIGKILL
AGENT_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


@dataclass(frozen=True)
class Options:
    """What the user asked ``smdrun`` for."""

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
        cls, *, ranks: int | None, channel: Sequence[str], mp_parameters: str | None, **rest: Any
    ) -> Options:
        """Check the command line's values and fill in the defaults that depend on the machine.

        Raises:
            ValueError: a value cannot be used; the text says which and what was expected.
        """
        if rest["nnodes"] > 1 and not rest["master_addr"]:
            raise ValueError(f"--nnodes {rest['nnodes']} needs --master-addr, the address of host 0")
        if rest["node_rank"] >= rest["nnodes"]:
            raise ValueError(f"--node-rank {rest['node_rank']} is outside 0..{rest['nnodes'] - 1}")
        if not rest["python"] and (rest["module"] or rest["device"] == "cpu"):
            raise ValueError("--no-python runs a program as it is: -m and --device cpu are for Python alone")
        count = ranks or default_ranks(rest["device"])
        _check_replicas(rest["elastic_replicas"], count, rest["nnodes"])
        channels = {}
        for given in channel:
            name, equals, path = given.partition("=")
            if not equals:
                raise ValueError(f"--channel {given!r}: expected NAME=PATH, for example training=data/train")
            channels[name] = Path(path)
        parameters = parse_mp_parameters(mp_parameters) if mp_parameters else {}
        return cls(ranks=count, channels=channels, mp_parameters=parameters, **rest)


def _check_replicas(replicas: int | None, ranks: int, nnodes: int) -> None:
    """Raise if so many replicas cannot come and go."""
    if replicas is None:
        return
    if nnodes > 1:
        raise ValueError("--elastic-replicas works on one host so far; leave out --nnodes")
    if ranks % replicas:
        raise ValueError(f"--elastic-replicas {replicas}: the {ranks} ranks cannot be shared out evenly")


def default_ranks(device: str) -> int:
    """One rank a GPU; without GPUs one a physical core, at most 8."""
    return gpu_count(device) or min(MOST_RANKS, len(affinity.local_cores()))


def gpu_count(device: str) -> int:
    """How many GPUs the ranks may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def run(options: Options) -> int:
    """Run the job; return the exit status: 0, that of the rank that failed first, or 128 + a signal."""
    console = Console(prefix=options.prefix, log_files=LogFiles(options.log_dir))
    job = str(uuid.uuid4())
    with job_folder() as folder, Guardian(job, folder) as guardian:
        os.environ[orphans.JOB] = job
        return _run_watched(options, console, folder, guardian)


def _run_watched(options: Options, console: Console, folder: Path, guardian: Guardian) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    from opensmd.launch.elastic.replica_agents import JobEndedByRanksError
    from opensmd.launch.output.logs import RankLogs
    from opensmd.launch.stores.other_hosts import OtherHosts

    def stop(number: int, _: object) -> None:
        raise SignalException(f"smdrun got signal {number}", signal.Signals(number))

    signals.listen(stop)
    orphans.adopt()
    try:
        _prepare(options)
    except SignalException as stopped:
        console.say(f"ended by {stopped.sigval.name}")
        return 128 + int(stopped.sigval)
    logs = RankLogs(console, folder)
    others = OtherHosts(options.nnodes, functools.partial(orphans.signal_children, spare=[guardian.pid]))
    failures: list[reports.Failure] = []
    status = 0
    with _OutputFolders():
        console.start()
        try:
            failures = [
                reports.Failure(rank, failure.exitcode, reports.read(Path(failure.error_file), rank))
                for rank, failure in _run_agents(options, logs, others, console).items()
            ]
        except JobEndedByRanksError as error:
            status = 1
            console.say(f"the job cannot go on: {error}")
        except SecretError as error:
            status = 1
            console.say(str(error))
        except (RendezvousClosedError, DistError) as error:
            status = 1
            console.say(f"the hosts of this job do not come together: {error}")
        except (SignalException, KeyboardInterrupt) as stopped:
            by = signal.SIGPIPE if console.reader_left else getattr(stopped, "sigval", signal.SIGINT)
            status = 128 + int(by)
        finally:
            signals.ignore()
            if failures or status:
                others.say_that_this_has_ended()
                orphans.end_all(spare=[guardian.pid])
            console.finish()
    if status > 128:
        why = ": nobody reads its output any more" * console.reader_left
        console.say(f"ended by {signal.Signals(status - 128).name}{why}")
    if others.ended_our_ranks and not any(failure.report for failure in failures):
        console.say(f"the ranks {FAILED_ELSEWHERE}: see the output of that one")
        return status or 1
    if not failures:
        return status
    if options.device != "cpu" and any(map(_asks_for_cuda, failures)) and not gpu_count(options.device):
        console.say("there is no CUDA device here; --device cpu runs scripts that hard-code CUDA on the CPU")
    return explain(failures, logs.ended(), console)


def _run_agents(
    options: Options, logs: RankLogs, others: OtherHosts | None, console: Console
) -> Mapping[int, ProcessFailure]:
    """Run all ranks to their end; return how those have failed that have ended the job."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from opensmd.launch.elastic.replica_agents import ReplicaAgents

    command = _rank_command(options)
    if options.elastic_replicas is None:
        try:
            config = _launch_config(options, logs, {"rank": options.node_rank, "others": others})
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return error.failures
        return {}
    of_replica = replace(options, ranks=options.ranks // options.elastic_replicas)

    def launch(before_attempt: Callable[[], None], place: Callable[[dict[str, str], int], None]) -> None:
        config = _launch_config(of_replica, logs.placing(place), {"before_attempt": before_attempt})
        elastic_launch(config, sys.executable)(*command)

    agents = ReplicaAgents(options.elastic_replicas, of_replica.ranks, options.max_restarts, launch, console)
    return agents.run()


def _asks_for_cuda(failure: reports.Failure) -> bool:
    if failure.report is None:
        return False
    # Accelerate divides by the number of devices when a SageMaker container's variables speak of smddp,
    # and torch built for CUDA of a missing NVIDIA driver.
    message = failure.report.message.lower()
    return "cuda" in message or "nvidia" in message or "device_count()" in failure.report.text


def _prepare(options: Options) -> None:
    """Threads, memory, the native core and the variables that every rank inherits."""
    cores = affinity.local_cores()
    os.environ.pop(OF_LAUNCHER, None)  # of an smdrun around this one
    if options.nnodes == 1:
        from opensmd.collectives.stores.listening import keep_on_loopback

        keep_on_loopback()
        os.environ[OF_LAUNCHER] = secrets.token_hex(32)
    elif options.master_addr:
        from opensmd.launch.interface import choose_towards

        choose_towards(options.master_addr, options.master_port)
    os.environ.setdefault("OMP_NUM_THREADS", str(affinity.threads_per_rank(cores, options.ranks)))
    os.environ.update(allocator.keeping_memory(os.environ))
    _build_once()
    hosts = _host_names(options.nnodes)
    job = Job(
        script=Path(options.script),
        args=options.args,
        output=options.output,
        host=hosts[options.node_rank],
        hosts=hosts,
        cpus=len(affinity.allowed_cpus()),
        gpus=options.ranks if options.device == "cpu" else gpu_count(options.device),
        ranks_per_host=options.ranks,
        channels=options.channels,
        mp_parameters=options.mp_parameters,
        dataparallel=options.dataparallel,
    )
    for name, value in job_variables(job).items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())
    for name in AGENT_LOGGERS:  # the console says better what they would say
        importlib.import_module(name)  # which sets the level itself
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _host_names(count: int) -> list[str]:
    """This host's own name; several hosts, which do not know each other's, have those of a container."""
    return [socket.gethostname()] if count == 1 else [f"algo-{number}" for number in range(1, count + 1)]


def _build_once() -> None:
    """Build the native core before the ranks start; if that fails they use Gloo, and one line says so."""
    from opensmd.environment.settings import Settings
    from opensmd.native.build import BuildError, build
    from opensmd.native.prebuilt import is_prebuilt

    os.environ.pop("SMDRUN_BUILD_ERROR", None)  # of an smdrun around this one
    if not Settings.from_environment().native:
        return
    try:
        library = build()
        if not is_prebuilt(library):
            os.environ["OPENSMD_CACHE_DIR"] = str(
                library.parent.parent
            )  # where that had to be another folder
    except BuildError as error:
        print(f"smdrun: {error}\nsmdrun: groups of the smddp backend will run over Gloo.", file=sys.stderr)
        os.environ["SMDRUN_BUILD_ERROR"] = str(error).splitlines()[0]


def _launch_config(options: Options, logs: RankLogs, rendezvous_options: dict[str, Any]) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    from opensmd.launch.stores import rendezvous

    rendezvous.register()
    alone = options.nnodes == 1
    return LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.ranks,
        run_id=str(uuid.uuid4()) if alone else f"smdrun-{options.master_port}",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint="" if alone else f"{options.master_addr}:{options.master_port}",
        rdzv_configs=rendezvous_options,
        local_addr="127.0.0.1" if alone else None,
        max_restarts=options.max_restarts,
        logs_specs=logs,
        shutdown_timeout=SHUTDOWN,
        signals_to_handle=",".join(number.name for number in signals.ending()),
    )


def _rank_command(options: Options) -> list[str]:
    command = ["-u", "-m", "opensmd.launch.rank", f"--device={options.device}"]
    command += ["--bind"] * options.bind + ["--module"] * options.module
    command += ["--no-python"] * (not options.python)
    return [*command, options.script, *options.args]


class _OutputFolders:
    """The folders the script is told of exist while it runs; those it left empty are removed again."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._wanted = [Path(os.environ[name]) for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR")]

    def __enter__(self) -> None:
        for path in self._wanted:
            self._made += [parent for parent in (path, *path.parents) if not parent.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"cannot make the folder {path}: {error.strerror}"
                print(f"smdrun: {why}; --output names another for what scripts save", file=sys.stderr)
                return

    def __exit__(self, *_: object) -> None:
        for path in sorted(self._made, reverse=True):
            with contextlib.suppress(OSError):  # something lies in it, or another job has removed it
                path.rmdir()
