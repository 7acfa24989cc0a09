"""``python -m tests.faults.campaign --trials 500 --seed 1``: run cases, print what broke, count by fault."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import pickle
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch

from opensmd.environment.settings import Settings
from opensmd.native import build
from tests.faults.campaign.hosts import Hosts, two_hosts
from tests.faults.campaign.kinds import COLLECTIVES, ON_HOSTS, SPLIT, Kind
from tests.faults.campaign.leftovers import named_memory, named_since
from tests.faults.campaign.load import busy_loops
from tests.faults.campaign.processes import become_subreaper, die_with_parent
from tests.faults.campaign.report import Report
from tests.faults.campaign.trial import try_case


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 3, 4], help="sizes of jobs")
    parser.add_argument("--backend", default="smddp", choices=["smddp", "gloo"])
    parser.add_argument("--split", action="store_true", help="in the training of a split model")
    parser.add_argument("--hosts", action="store_true", help="on two hosts, which are network namespaces")
    parser.add_argument(
        "--timeout", type=float, help="of the groups, in seconds (default: 3; 5 with --split)"
    )
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside")
    parser.add_argument("--report", type=Path, help="write everything to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code says whether all was as promised (in forked ranks: their own)."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.backend == "smddp":
        build.load(Settings.from_environment())  # once, for all that are forked from here
    if options.split:
        import_all_of_smp()
    gc.freeze()  # ranks that look through what torch is made of when they end would take a second for it
    memory = named_memory()
    links = []
    for job in range(options.jobs):
        ours, theirs = Pipe(duplex=False)
        if os.fork() == 0:
            ours.close()
            return work(options, job, theirs)
        theirs.close()
        links.append(ours)
    began = time.monotonic()
    report = Report()
    with busy_loops(options.load):
        collect(links, report)
    report.left = named_since(memory)
    print(report.table())
    print(f"{report.broken} of {len(report.results)} broken in {time.monotonic() - began:.0f} s")
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        report.write(options.report, **{name: str(value) for name, value in vars(options).items()})
    complete = len(report.results) == options.trials
    return 0 if complete and not report.broken and not report.left else 1


def import_all_of_smp() -> None:
    """What each rank would import at its first step; nothing that looks at which rank it is."""
    for name in ("torch._dynamo", "opensmd.modelparallel.model", "opensmd.modelparallel.optimizer"):
        importlib.import_module(name)
    for name in ("step", "init", "checkpoint.save_folder", "runtime.engine", "dry_run.capture"):
        importlib.import_module(f"opensmd.modelparallel.{name}")


def work(options: argparse.Namespace, job: int, link: Connection) -> int:
    """Run this worker's share of the cases; what returns first in a rank's process is that rank."""
    die_with_parent()
    # In a session of its own: the kernel wakes stopped processes of a group that loses its last parent.
    os.setsid()
    become_subreaper()
    kind = SPLIT if options.split else ON_HOSTS if options.hosts else COLLECTIVES
    with two_hosts() if options.hosts else contextlib.nullcontext() as hosts:
        return try_share(options, job, link, kind, hosts)


def try_share(
    options: argparse.Namespace, job: int, link: Connection, kind: Kind, hosts: Hosts | None
) -> int:
    """As :func:`work`."""
    for trial in range(options.first + job, options.first + options.trials, options.jobs):
        case = kind.draw(options.seed, trial, options.world, options.timeout or kind.timeout)
        result = try_case(kind, case, options.backend, hosts)
        if isinstance(result, int):
            return result
        link.send_bytes(pickle.dumps(result))
    return 0


def collect(links: list[Connection], report: Report) -> None:
    """Take in the workers' results until all have ended."""
    while links:
        for link in wait(links):
            assert isinstance(link, Connection)
            try:
                report.add(pickle.loads(link.recv_bytes()))
            except EOFError:
                links.remove(link)


if __name__ == "__main__":
    sys.exit(main())
