"""The ``smdrun`` command: starts a script's ranks on one host or several, with torch's elastic agent."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from opensmd.environment.job_secret import JobSecret
from opensmd.environment.loopback import why_loopback_is_down
from opensmd.environment.settings import Settings
from opensmd.launch import option_values, signals, torch_import
from opensmd.launch.folder_claim import claim
from opensmd.launch.hosts.driver import SSH, HostsJob, run_on_hosts
from opensmd.launch.hosts.host_list import parse_file, parse_list
from opensmd.launch.leftovers import open_files
from opensmd.launch.leftovers.guardian import job_folder
from opensmd.launch.options import Options
from opensmd.launch.output import streams
from opensmd.launch.run import run
from opensmd.launch.script import check_module, check_script, find_program
from opensmd.timeline.recorder import VARIABLE
from opensmd.timeline.results import begin_timeline, write_results

__all__ = ["main"]

# Options that the command for several hosts sets on each host itself, or keeps for itself.
_OF_HOSTS = {"hosts", "hostfile", "ssh", "ranks", "nnodes", "node_rank", "master_addr", "master_port"}
_OF_HOSTS |= {"timeline", "records"}
_CONTEXT = {
    "allow_interspersed_args": False,
    "auto_envvar_prefix": "SMDRUN",
    "token_normalize_func": option_values.with_hyphens,
}


@click.command(context_settings=_CONTEXT)
@click.option(
    "-n",
    "-np",
    "--ranks",
    "--nproc-per-node",
    "ranks",
    metavar="INTEGER",
    callback=option_values.ranks,
    envvar=["SMDRUN_RANKS", "PET_NPROC_PER_NODE"],
    help="Ranks on this host. Default: one per GPU; without GPUs one per core, at most 8.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu"]),
    default="auto",
    show_default=True,
    help="cpu: run a script that hard-codes CUDA on the CPU (docs/launch.md says what is mapped).",
)
@click.option(
    "--bind/--no-bind",
    default=True,
    show_default=True,
    help="Pin each rank to its share of the cores, unless an OpenMP affinity variable is set.",
)
@click.option(
    "--python/--no-python",
    default=True,
    show_default=True,
    help="--no-python: SCRIPT is a program to run as it is, for example a shell script.",
)
@click.option("--prefix/--no-prefix", default=True, show_default=True, help="Put [rank] before each line.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for one file per rank (rank-0.log) with all its output, in addition to the console.",
)
@click.option(
    "--timeline",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=VARIABLE,
    help="Folder for a record of what every rank did: trace.json for Perfetto, and timeline.html.",
)
@click.option(
    "--records",
    type=click.Path(file_okay=False, path_type=Path),
    hidden=True,
    help="Folder for this host's part of a timeline, which the command for all hosts fetches.",
)
@click.option(
    "--hosts",
    metavar="A:2,B:2",
    help="Run on these hosts over ssh, with this many ranks each; A is host 0.",
)
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Like --hosts, from a file with lines such as 'a slots=2'.",
)
@click.option("--ssh", default=SSH, show_default=True, help="The command that reaches a host.")
@click.option("--standalone", is_flag=True, help="As in torchrun: one host, the default.")
@click.option(
    "--nnodes",
    default="1",
    metavar="INTEGER",
    callback=option_values.hosts,
    show_default=True,
    envvar=["SMDRUN_NNODES", "PET_NNODES"],
    help="Number of hosts.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    envvar=["SMDRUN_NODE_RANK", "PET_NODE_RANK"],
    help="This host's number, from 0.",
)
@click.option(
    "--master-addr",
    envvar=["SMDRUN_MASTER_ADDR", "PET_MASTER_ADDR"],
    help="Address of host 0; needed with several hosts.",
)
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=29500,
    show_default=True,
    envvar=["SMDRUN_MASTER_PORT", "PET_MASTER_PORT"],
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    envvar=["SMDRUN_MAX_RESTARTS", "PET_MAX_RESTARTS"],
    help="How often to restart all ranks (with --elastic-replicas, one replica's ranks) after a failure.",
)
@click.option(
    "--elastic-replicas",
    type=click.IntRange(min=1),
    metavar="N",
    help="Split the ranks into N replicas that restart separately; see the setting elastic of smp.init.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("output"),
    show_default=True,
    help="Folder for SM_MODEL_DIR and SM_OUTPUT_DATA_DIR.",
)
@click.option("--channel", multiple=True, metavar="NAME=PATH", help="Input data: sets SM_CHANNEL_NAME.")
@click.option("--mp-parameters", metavar="K=V,... | JSON", help="Model parallelism: SM_HP_MP_PARAMETERS.")
@click.option("--dataparallel", is_flag=True, help="Tell Hugging Face's Trainer to use smddp.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.version_option(package_name="opensmd")
@click.pass_context
@signals.interruptible()
def main(context: click.Context, /, **options: Any) -> None:
    """Run SCRIPT with ARGS in several processes that are connected through torch.distributed.

    Each process has RANK, LOCAL_RANK, WORLD_SIZE and the other variables that a SageMaker container sets.
    If one fails, smdrun shows its traceback first, ends the others, and exits with its status.
    """
    streams.prepare()
    _require_current_folder()
    job = _on_hosts(context, options)
    if job is not None:
        raise SystemExit(_run_on_hosts(job))
    torch_import.without_collector()
    with ExitStack() as claims:
        try:
            _look_at(options["script"], module=options["module"], python=options["python"])
            chosen = _checked(options)
            _look_at_host(chosen)
            _claim_folders(chosen, claims)
            folder = claims.enter_context(job_folder())
        except ValueError as error:
            print(f"smdrun: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        status = run(chosen, folder)
        if chosen.timeline is not None:
            _show_timeline(Path(os.environ[VARIABLE]))
    raise SystemExit(status)


def _require_current_folder() -> None:
    try:
        Path.cwd()
    except OSError:
        print("smdrun: the current folder has been removed: change to one that exists", file=sys.stderr)
        raise SystemExit(2) from None


def _on_hosts(context: click.Context, options: dict[str, Any]) -> HostsJob | None:
    """Return the job on several hosts that the options request, and remove the options for it alone."""
    listed, file, ssh = (options.pop(name) for name in ("hosts", "hostfile", "ssh"))
    if not listed and file is None:
        return None
    if options["standalone"]:
        raise click.UsageError("--standalone is a job on one host; leave it out with --hosts and --hostfile")
    if listed and file is not None:
        raise click.UsageError("--hosts and --hostfile both say where to run; give one of them")
    try:
        hosts = parse_list(listed) if listed else parse_file(file.read_text(), str(file))
        option_values.require_command("--ssh", ssh)
        JobSecret.from_environment()
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    ranks = ["-n", str(options["ranks"])] if options["ranks"] else []
    return HostsJob(
        hosts,
        [*ranks, *option_values.given(context, leave_out=_OF_HOSTS)],
        [options["script"], *options["args"]],
        options["master_addr"] or hosts[0].address,
        options["master_port"],
        ssh,
        options["timeline"],
    )


def _run_on_hosts(job: HostsJob) -> int:
    if job.timeline is None:
        return run_on_hosts(job)
    with ExitStack() as claims:
        try:
            claims.enter_context(claim("--timeline", job.timeline, 0))
            folder = begin_timeline(job.timeline)
        except ValueError as error:
            print(f"smdrun: {error}", file=sys.stderr)
            return 2
        status = run_on_hosts(job)
        _show_timeline(folder)
    return status


def _claim_folders(chosen: Options, claims: ExitStack) -> None:
    """Create the folders that this job's ranks write to, and keep other jobs out of them."""
    first_rank = chosen.node_rank * chosen.ranks
    if chosen.log_dir is not None:
        claims.enter_context(claim("--log-dir", chosen.log_dir, first_rank))
    records = chosen.timeline or chosen.records
    if records is not None:
        claims.enter_context(claim("--timeline", records, first_rank))
        os.environ[VARIABLE] = str(begin_timeline(records))


def _show_timeline(folder: Path) -> None:
    try:
        trace, page = write_results(folder)
    except (ValueError, OSError) as error:
        print(f"smdrun: no timeline: {error}", file=sys.stderr)
    else:
        print(f"smdrun: timeline: {page}, and for https://ui.perfetto.dev {trace}", file=sys.stderr)


def _look_at(script: str, *, module: bool, python: bool) -> None:
    if not python:
        find_program(script)
    elif module:
        check_module(script)
    else:
        check_script(script)


def _look_at_host(chosen: Options) -> None:
    open_files.allow_for(chosen.ranks)
    down = why_loopback_is_down() if chosen.nnodes == 1 or chosen.elastic_replicas else None
    if down is not None:
        raise ValueError(down)


def _checked(options: dict[str, Any]) -> Options:
    try:
        chosen = Options.from_command_line(**options)
        JobSecret.from_environment()
        Settings.from_environment()  # reports a bad variable like a bad option
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return chosen


if __name__ == "__main__":
    main()
