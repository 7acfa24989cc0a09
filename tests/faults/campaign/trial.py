"""One case from its processes' start to the verdict."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any

from tests.faults.campaign.cases import OF_LINKS
from tests.faults.campaign.hosts import Hosts
from tests.faults.campaign.kinds import Kind
from tests.faults.campaign.oracle import GRACE, Seen
from tests.faults.campaign.processes import Job
from tests.support.ports import free_port

__all__ = ["Result", "try_case"]

BLOWS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}  # from outside
SLACK = 20.0  # beyond the oracle's own limit, so that a late answer is told from none


@dataclass
class Result:
    """What a case came to.

    Attributes:
        case: what was to happen.
        seen: what the oracle read from it.
        left: what was left behind.
        output: what the ranks wrote, where something is wrong.
    """

    case: Any
    seen: Seen
    left: list[str] = field(default_factory=list)
    output: str = ""


def try_case(kind: Kind, case: Any, backend: str, hosts: Hosts | None = None) -> Result | int:
    """Run a case; in its ranks' own processes, their exit code."""
    job = Job(case.ranks, hosts)
    port = free_port()
    for rank in range(case.ranks):
        if job.fork():
            return job.report(lambda: kind.run_rank(case, rank, backend, port, job), tidy=case.tidy)  # noqa: B023
    started = job.wait_until_ready()
    if started and case.moment == "anytime":
        time.sleep(case.delay)
        _strike(case, job)
    silent = {case.victim} if case.fault in kind.silences else set()
    waits_for = set(range(case.ranks)) - silent
    if started:
        job.wait_for(waits_for, time.monotonic() + 2 * case.timeout + GRACE + SLACK)
        job.show_stacks(waits_for)
    fates = job.end(silent if started else set(range(case.ranks)))
    seen = kind.judge(case, fates, job, backend == "smddp", started)
    if hosts is not None and case.fault in OF_LINKS:
        hosts.mend()
    left = job.close()
    wrong = seen.findings or left
    output = "\n".join(f"--- rank {rank}\n{fate.output}" for rank, fate in enumerate(fates)) if wrong else ""
    return Result(case, seen, left, output)


def _strike(case: Any, job: Job) -> None:
    if job.hosts is not None and case.fault in OF_LINKS:
        job.board.strike()
        job.hosts.cut() if case.fault == "cut link" else job.hosts.slow_down()
        if case.fault == "slow link":
            time.sleep(case.timeout / 4)
            job.hosts.mend()
    if case.fault not in BLOWS:
        return
    job.board.strike()
    job.signal(case.victim, BLOWS[case.fault])
    if case.fault == "pause":
        time.sleep(case.timeout / 4)
        job.signal(case.victim, signal.SIGCONT)
