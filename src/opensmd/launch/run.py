"""One job: prepare the host, run the ranks with torch's elastic agent, show their output, end what is left.

Steps: 1. ``preparation`` readies the host; 2. the agent starts ``opensmd.launch.rank`` for each rank and
    watches it; 3. when a rank fails or a signal comes, every remaining process of the job is ended, even
    those whose parents are dead. If smdrun itself is killed, a guardian does that, and removes the job's
    files.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensmd.environment.job_secret import SecretError
from opensmd.launch import signals
from opensmd.launch.leftovers import orphans
from opensmd.launch.leftovers.guardian import Guardian
from opensmd.launch.options import Options, gpu_count
from opensmd.launch.output import reports
from opensmd.launch.output.console import Console
from opensmd.launch.output.explanation import FAILED_ELSEWHERE, explain
from opensmd.launch.output.log_files import LogFiles
from opensmd.launch.output_folders import OutputFolders
from opensmd.launch.preparation import prepare

if TYPE_CHECKING:  # torch is imported only when there is something to launch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from opensmd.launch.output.logs import RankLogs
    from opensmd.launch.stores.other_hosts import OtherHosts

__all__ = ["run"]

SHUTDOWN = 10  # seconds that ranks get between SIGTERM or Ctrl-C and SIGKILL


@dataclass(frozen=True)
class _Ending:
    """How a job ended.

    Attributes:
        status: 0; or 1 or 128 + a signal if something other than a rank has ended the job.
        failures: those of the ranks.
    """

    status: int = 0
    failures: Sequence[reports.Failure] = ()


def run(options: Options, folder: Path) -> int:
    """Run the job; return the exit status: 0, that of the rank that failed first, or 128 + a signal.

    Args:
        options: what the user asked for.
        folder: for the job's own files; if this process is killed, the guardian removes it.
    """
    console = Console(prefix=options.prefix, log_files=LogFiles(options.log_dir))
    job = str(uuid.uuid4())
    with Guardian(job, folder) as guardian:
        os.environ[orphans.JOB] = job
        return _run_watched(options, console, folder, guardian)


def _run_watched(options: Options, console: Console, folder: Path, guardian: Guardian) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    from opensmd.launch.output.logs import RankLogs
    from opensmd.launch.stores.other_hosts import OtherHosts

    received = _raise_at_signals()
    orphans.adopt()
    with suppress(SignalException):
        prepare(options)
    if received:  # also if the exception came where Python ignores all, in a __del__
        console.say(f"ended by {received[0].name}")
        return 128 + received[0]
    logs = RankLogs(console, folder)
    others = OtherHosts(options.nnodes, functools.partial(orphans.signal_children, spare=[guardian.pid]))
    ending = _Ending()
    with OutputFolders(), orphans.reaped():
        console.start()
        try:
            ending = _run_to_the_end(options, logs, others, console)
        finally:
            signals.ignore()
            if ending.failures or ending.status:
                others.say_that_this_has_ended()
                orphans.end_all(spare=[guardian.pid])
            console.finish()
    return _explained(ending, options, logs, others, console)


def _raise_at_signals() -> list[signal.Signals]:
    """Raise an exception at each signal from now on; return a list to which they are added."""
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[signal.Signals] = []

    def stop(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        raise SignalException(f"smdrun got signal {number}", received[-1])

    signals.listen(stop)
    return received


def _run_to_the_end(options: Options, logs: RankLogs, others: OtherHosts, console: Console) -> _Ending:
    """Run all ranks; if something other than a rank ended the job, say what."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    from opensmd.launch.elastic.replica_agents import JobEndedByRanksError

    try:
        failed = _run_agents(options, logs, others, console)
        return _Ending(
            failures=[
                reports.Failure(rank, failure.exitcode, reports.read(Path(failure.error_file), rank))
                for rank, failure in failed.items()
            ]
        )
    except JobEndedByRanksError as error:
        console.say(f"the job cannot go on: {error}")
    except SecretError as error:
        console.say(str(error))
    except (RendezvousClosedError, DistError) as error:
        console.say(f"the hosts of this job do not come together: {error}")
    except OSError as error:
        limit = " (ulimit -u, or the container's limit on processes)" * (error.errno == errno.EAGAIN)
        console.say(f"the ranks cannot be started: {error}{limit}")
    except (SignalException, KeyboardInterrupt) as stopped:
        by = signal.SIGPIPE if console.reader_left else getattr(stopped, "sigval", signal.SIGINT)
        return _Ending(status=128 + int(by))
    return _Ending(status=1)


def _explained(
    ending: _Ending, options: Options, logs: RankLogs, others: OtherHosts, console: Console
) -> int:
    """Tell the user how the job ended; return the exit status."""
    status, failures = ending.status, ending.failures
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
    if options.device == "cpu" and any(map(_asks_for_an_accelerator, failures)):
        console.say('there is no torch.accelerator here; for torch.device(0), write torch.device("cuda", 0)')
    return explain(failures, logs.ended(), console)


def _run_agents(
    options: Options, logs: RankLogs, others: OtherHosts, console: Console
) -> Mapping[int, ProcessFailure]:
    """Run all ranks to their end; return the failures that have ended the job."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from opensmd.launch.elastic.hosts_of_replicas import HostPlace
    from opensmd.launch.elastic.replica_agents import ReplicaAgents

    command = _rank_command(options)
    if options.elastic_replicas is None:
        try:
            config = _launch_config(options, logs, {"rank": options.node_rank, "others": others})
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return error.failures
        return {}
    replicas, host = options.elastic_replicas, HostPlace()
    if options.master_addr and options.nnodes > 1:
        host = HostPlace(options.node_rank, options.nnodes, options.master_addr, options.master_port)
    of_replica = replace(options, ranks=options.ranks * options.nnodes // replicas, nnodes=1)

    def launch(before_attempt: Callable[[], None], place: Callable[[dict[str, str], int], None]) -> None:
        config = _launch_config(of_replica, logs.placing(place), {"before_attempt": before_attempt})
        elastic_launch(config, sys.executable)(*command)

    agents = ReplicaAgents(replicas, of_replica.ranks, options.max_restarts, launch, console, host)
    return agents.run()


def _asks_for_cuda(failure: reports.Failure) -> bool:
    if failure.report is None:
        return False
    # Accelerate divides by the number of devices if a SageMaker container's variables name smddp, and torch
    # built for CUDA complains about a missing NVIDIA driver.
    message = failure.report.message.lower()
    return "cuda" in message or "nvidia" in message or "device_count()" in failure.report.text


def _asks_for_an_accelerator(failure: reports.Failure) -> bool:
    return failure.report is not None and "Cannot access accelerator device" in failure.report.message


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
    return [*command, "--", options.script, *options.args]
