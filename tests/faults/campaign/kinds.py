"""The two kinds of campaigns: collectives and messages, and the training of a split model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.faults.campaign import cases, member, oracle
from tests.faults.campaign.oracle import Seen
from tests.faults.campaign.processes import Job
from tests.faults.campaign.records import Fate, Record
from tests.faults.campaign.split import cases as split_cases
from tests.faults.campaign.split import member as split_member
from tests.faults.campaign.split import oracle as split_oracle
from tests.faults.campaign.split.aftermath import look_at

__all__ = ["COLLECTIVES", "ON_HOSTS", "SPLIT", "Kind"]


@dataclass(frozen=True)
class Kind:
    """What a campaign consists of.

    Attributes:
        draw: the case of a seed, a trial, the sizes of jobs, and a timeout.
        run_rank: a rank's side of a case, given the rank, the backend, a port and the job.
        judge: the oracle, given the case, what became of the ranks, the job, whether smddp's promises hold,
            and whether all groups were made.
        silences: faults after which the victim does not answer.
        timeout: of groups, in seconds, where none is given.
    """

    draw: Callable[[int, int, list[int], float], Any]
    run_rank: Callable[[Any, int, str, int, Job], Record]
    judge: Callable[[Any, list[Fate], Job, bool, bool], Seen]
    silences: tuple[str, ...]
    timeout: float


def _judge_split(case: Any, fates: list[Fate], job: Job, smddp: bool, started: bool) -> Seen:
    after = look_at(case, job.folder / "checkpoints")
    return split_oracle.judge(case, fates, job.board.struck, after, started=started)


COLLECTIVES = Kind(
    draw=cases.draw,
    run_rank=lambda case, rank, backend, port, job: member.run_rank(
        case, rank, backend, f"{job.store}:{port}", job.board
    ),
    judge=lambda case, fates, job, smddp, started: oracle.judge(
        case, fates, job.board.struck, smddp=smddp, started=started
    ),
    silences=cases.SILENT,
    timeout=3.0,
)
ON_HOSTS = replace(COLLECTIVES, draw=cases.draw_on_hosts)
SPLIT = Kind(
    draw=split_cases.draw,
    run_rank=lambda case, rank, backend, port, job: split_member.run_rank(
        case, rank, backend, port, job.board, job.folder / "checkpoints"
    ),
    judge=_judge_split,
    silences=("stop", "absent"),
    timeout=5.0,
)
