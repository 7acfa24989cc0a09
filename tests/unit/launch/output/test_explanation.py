"""What a job is said to have died of."""

from __future__ import annotations

import signal
from typing import Any

from opensmd.launch.output.explanation import explain
from opensmd.launch.output.reports import Failure, Report


class Screen:
    """Takes what would be shown; has shown nothing before."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[Report] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def was_shown(self, report: Report) -> bool:
        return report in self.shown

    def show_report(self, report: Report) -> None:
        self.shown.append(report)


def failed(rank: int, message: str, at: int, *, lost: bool = False, where: str = "") -> Failure:
    report = Report(rank, message, f"Traceback: {message}", at, of_communication=lost, where=where)
    return Failure(rank, 1, report)


def explained(*failures: Failure, ended: dict[int, int | None] | None = None) -> tuple[int, Any]:
    screen: Any = Screen()
    return explain(failures, ended or {}, screen), screen


def test_the_first_failure_is_named_with_its_line_and_what_followed_in_a_line() -> None:
    first = failed(1, "ValueError: bad\nmore", 10, where="/home/me/train.py:40")
    status, screen = explained(failed(0, "DistError: rank 1 has died", 20, lost=True), first)
    assert status == 1
    assert screen.said == [
        "rank 1 failed first: ValueError: bad (/home/me/train.py:40)",
        "rank 0 ended after it: DistError: rank 1 has died",
    ]
    assert screen.shown == [first.report], "tracebacks of consequences are left out"


def test_ranks_that_fail_alike_are_one_line() -> None:
    same = [failed(rank, "ValueError: bad", 10 + rank) for rank in range(3)]
    _, screen = explained(*same)
    assert screen.said == ["rank 0 failed first: ValueError: bad", "ranks 1, 2 failed in the same way"]
    assert len(screen.shown) == 1


def test_another_failure_of_its_own_is_shown_whole() -> None:
    one, other = failed(0, "ValueError: bad", 10), failed(1, "KeyError: other", 20)
    _, screen = explained(one, other)
    assert screen.shown == [one.report, other.report]


def test_a_rank_that_others_still_needed_is_named_although_it_did_not_fail() -> None:
    lost = failed(0, "DistError: rank 1 has left", 20, lost=True)
    status, screen = explained(lost, ended={0: None, 1: 10})
    assert screen.said[0] == "rank 1 ended first, with exit code 0, while others still needed it"
    assert screen.said[1].startswith("rank 0 failed after it: DistError") and status == 1


def test_a_rank_that_is_ended_while_it_cleans_up_has_ended_by_itself() -> None:
    lost = failed(1, "DistError: rank 0 has left the group", 20, lost=True)
    status, screen = explained(Failure(0, -signal.SIGTERM), lost, ended={0: 10, 1: None})
    assert screen.said == [
        "rank 0 ended first, with exit code 0, while others still needed it",
        "rank 1 failed after it: DistError: rank 0 has left the group",
    ]
    assert status == 1


def test_a_rank_that_somebody_ends_while_it_cleans_up_is_named_if_no_other_failed() -> None:
    status, screen = explained(Failure(0, -signal.SIGTERM), ended={0: 10, 1: 10})
    assert screen.said == ["rank 0 failed first: killed by SIGTERM"] and status == 143


def test_a_rank_of_another_launcher_is_looked_for_there() -> None:
    lost = failed(0, "DistError: rank 2 on node7 and rank 3 on node7 have died", 20, lost=True)
    _, screen = explained(lost, ended={0: None, 1: None})
    assert screen.said == [
        "ranks 2, 3 of another smdrun failed first: see the output of that one",
        "rank 0 failed after them: DistError: rank 2 on node7 and rank 3 on node7 have died",
    ]


def test_a_signal_gives_a_shells_status() -> None:
    status, screen = explained(Failure(1, -9))
    assert status == 137 and screen.said[0].startswith("rank 1 failed first: killed by SIGKILL; the kernel")
