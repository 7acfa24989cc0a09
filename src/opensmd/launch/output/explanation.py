"""Explaining why a job failed: the first failure first, then what followed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opensmd.launch.output import reports
from opensmd.launch.output.console import Console

__all__ = ["FAILED_ELSEWHERE", "explain"]

FAILED_ELSEWHERE = "of another smdrun failed first"


def explain(failures: Sequence[reports.Failure], ended: Mapping[int, int | None], console: Console) -> int:
    """Show the failures that have not been shown yet, the first one first.

    Args:
        failures: of this host's ranks.
        ended: when the scripts of this host's ranks ended, from :func:`reports.read_end`.
        console: where to show them.

    Returns:
        The exit status of the job.
    """
    failures = reports.unfinished(failures, ended)
    first = reports.first_failure(failures)
    if first.report is not None and not console.was_shown(first.report):
        console.show_report(first.report)
    early_ranks = reports.left_early(first, ended, [failure.rank for failure in failures])
    elsewhere = reports.died_elsewhere(first, ended)
    if elsewhere:
        console.say(f"{_ranks(elsewhere)} {FAILED_ELSEWHERE}: see the output of that one")
        console.say(f"rank {first.rank} failed after {_it(elsewhere)}: {_in_a_line(first, first=True)}")
    elif early_ranks:
        console.say(
            f"{_ranks(early_ranks)} ended first, with exit code 0, while others still needed "
            f"{_it(early_ranks)}"
        )
        console.say(f"rank {first.rank} failed after {_it(early_ranks)}: {_in_a_line(first, first=True)}")
    else:
        console.say(f"rank {first.rank} failed first: {_in_a_line(first, first=True)}")
    alike = [failure.rank for failure in failures if failure is not first and _same_text(failure, first)]
    if alike:
        console.say(f"{_ranks(alike)} failed in the same way")
    rest = [failure for failure in failures if failure is not first and failure.rank not in alike]
    for failure in sorted(rest, key=lambda failure: failure.report.nanoseconds if failure.report else 0):
        report = failure.report
        if report is None or report.of_communication or console.was_shown(report):
            console.say(f"rank {failure.rank} ended after it: {_in_a_line(failure)}")
        else:
            console.show_report(report)
    return reports.exit_status(first)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _same_text(one: reports.Failure, other: reports.Failure) -> bool:
    """Whether both ranks left the same traceback."""
    return one.report is not None and other.report is not None and one.report.text == other.report.text != ""


def _in_a_line(failure: reports.Failure, *, first: bool = False) -> str:
    if failure.report is None:
        return reports.describe_exit(failure.exit_code, first=first)
    message, where = failure.report.message.splitlines()[0], failure.report.where
    return f"{message} ({where})" if where else message
