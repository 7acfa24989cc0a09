"""What went wrong on which rank, and which failure came first.

A rank that fails leaves a report in the file that torch's elastic agent names (TORCHELASTIC_ERROR_FILE). It
has torch's format with two more fields: the time in nanoseconds, and whether it is a communication error.
When a rank fails, its peers fail because they lose it. So if there is a failure of another kind,
communication errors count as its consequences.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "Failure",
    "Report",
    "describe_exit",
    "died_elsewhere",
    "exit_status",
    "first_failure",
    "left_early",
    "read",
    "read_end",
    "write",
    "write_end",
]

# What a rank raises when it loses a peer: torch's and the pipeline's classes, by name to avoid importing
# them, and the words of Gloo, which raises plain RuntimeErrors.
_LOST_PEER_CLASSES = {"DistError", "PeerFailed"}
_LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_DEATH_WORDS = (*_LOST_PEER_WORDS, " has died", " have died", " has left")  # the last three are smddp's
_LIVES_ON = "has become another program"  # and so died as a rank; the launcher has to end it
# "rank 2 has died", "rank 2 on node7 and rank 3 on node7 have died"
_NAMED_DEAD = re.compile(r"((?:rank \d+(?: on \S+?)?(?:, | and )?)+) (?:has|have) (?:died|left)")
# The folders of Python's library and of this package, and pseudo-files such as "<frozen runpy>".
_PACKAGES = Path(__file__).parents[3]
_LIBRARIES = (
    f"{sysconfig.get_paths()['stdlib']}/",
    f"{_PACKAGES}/opensmd/",
    f"{_PACKAGES}/smdistributed/",
    "<",
)
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_END = "ended"  # the file that records a script's end


@dataclass(frozen=True)
class Report:
    """One rank's exception, or its exit with a nonzero code, which has no ``text`` to show.

    Attributes:
        where: the innermost line of the user's own code, as text; empty if there is none.
    """

    rank: int
    message: str
    text: str
    nanoseconds: int
    of_communication: bool
    exit_code: int = 1
    where: str = ""


@dataclass(frozen=True)
class Failure:
    """One rank that ended badly: its exit code (negative: the signal) and its report, if it left one."""

    rank: int
    exit_code: int
    report: Report | None = None


def write(path: Path, error: BaseException, trace: TracebackType | None, rank: int) -> None:
    """Write the report of an exception to ``path``, atomically."""
    now = time.time_ns()
    lost = {base.__name__ for base in type(error).__mro__} & _LOST_PEER_CLASSES
    leaving = isinstance(error, SystemExit)
    data = {
        "message": {
            "message": _exit_words(error) if leaving else f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "" if leaving else "".join(_formatted(error, trace)),
                "timestamp": str(now // 10**9),
                "nanoseconds": now,
                "of_communication": bool(lost) or any(words in str(error) for words in _LOST_PEER_WORDS),
                "exit_code": code_of(error),
                "rank": rank,
                "where": "" if leaving else _innermost_line(trace),
            },
        }
    }
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(data))
    partial.rename(path)


def code_of(error: BaseException) -> int:
    """Return the exit code of a Python process that this exception ends."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _exit_words(error: BaseException) -> str:
    return f"exit code {code_of(error)}, by sys.exit({getattr(error, 'code', None)!r})"


def _formatted(error: BaseException, trace: TracebackType | None) -> list[str]:
    return traceback.format_exception(type(error), error, trace)


def _innermost_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code: not in this package, Python's or installed ones."""
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_LIBRARIES)]
    own = [frame for frame in own if not _INSTALLED.search(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def read(path: Path, rank: int) -> Report | None:
    """Read the report in ``path``, also one by a script's own ``@record``; None if there is none."""
    try:
        return _parsed(json.loads(path.read_text()), rank)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a script may write anything there
        return None


def _parsed(content: Any, rank: int) -> Report:
    message = content["message"]
    if isinstance(message, str):
        return Report(rank, _printable(message), _printable(message), 0, False)
    extra = message["extraInfo"]
    return Report(
        rank,
        _printable(message["message"]),
        _printable(extra["py_callstack"]),
        extra.get("nanoseconds", int(extra["timestamp"]) * 10**9),
        extra.get("of_communication", False),
        extra.get("exit_code", 1),
        extra.get("where", ""),
    )


def _printable(text: str) -> str:
    """Escape lone surrogates, which no file can hold, as Python does when it shows them."""
    return text.encode(errors="backslashreplace").decode()


def write_end(report: Path) -> None:
    """Note, next to where a report would be, that a rank's script has just ended."""
    report.with_name(_END).write_text(str(time.time_ns()))


def read_end(report: Path) -> int | None:
    """Read what :func:`write_end` noted, or return None."""
    try:
        return int(report.with_name(_END).read_text())
    except (OSError, ValueError):
        return None


def left_early(first: Failure, ended: Mapping[int, int | None], failed: Sequence[int]) -> list[int]:
    """Return ranks that caused the first failure without failing themselves, by ending before the others.

    Args:
        first: the first failure.
        ended: when the script of each rank ended, from :func:`read_end`.
        failed: all ranks that failed.
    """
    report = first.report
    if report is None or not report.of_communication or not _tells_of_a_death(report):
        return []
    named_dead = _named_dead(report)
    early_ranks = []
    for rank, when in ended.items():
        early = (
            rank in named_dead
            if when is None
            else when < report.nanoseconds and rank in (named_dead or {rank})
        )
        if early and rank not in failed:
            early_ranks.append(rank)
    return early_ranks


def died_elsewhere(first: Failure, ended: Mapping[int, int | None]) -> list[int]:
    """Return the ranks of other launchers that have died according to the first failure.

    Args:
        first: the first failure of this launcher's ranks.
        ended: has an entry for each of this launcher's ranks.
    """
    report = first.report
    if report is None or not report.of_communication:
        return []
    return sorted(_named_dead(report) - ended.keys())


def unfinished(failures: Sequence[Failure], ended: Mapping[int, int | None]) -> Sequence[Failure]:
    """Return the failures except those of ranks whose script had already ended when the launcher ended them.

    If there are no others, return all of them.

    Args:
        failures: of this launcher's ranks.
        ended: when the script of each rank ended, from :func:`read_end`.
    """
    unexplained = [
        failure for failure in failures if ended.get(failure.rank) is None or not _is_ended(failure)
    ]
    return unexplained or failures


def _named_dead(report: Report) -> set[int]:
    lists = " ".join(_NAMED_DEAD.findall(report.message))
    return {int(rank) for rank in re.findall(r"rank (\d+)", lists)}


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others, which are in the order in which the launcher saw them.

    In order of preference: a rank killed by a signal that the launcher did not send, one that failed without
    an exception, one whose exception is not about communication; among equals, the earliest exception.
    """
    ended_by_launcher = not (_is_ended(failures[0]) or _begins_with_a_death(failures))

    def key(failure: Failure) -> tuple[int, int]:
        report = failure.report
        if ended_by_launcher and _is_ended(failure):
            return (3, 0)
        if report is None:
            return (0, 0)
        return (2 if report.of_communication else 1, report.nanoseconds)

    return min(failures, key=key)


def _is_ended(failure: Failure) -> bool:
    """Whether a rank ended by a signal that the launcher uses, though perhaps from somebody else."""
    return failure.exit_code in (-signal.SIGTERM, -signal.SIGINT) and failure.report is None


def _begins_with_a_death(failures: Sequence[Failure]) -> bool:
    """Whether the first exception says that a process is gone, hence before the launcher ended any."""
    known = [failure.report for failure in failures if failure.report is not None]
    if not known or not all(report.of_communication for report in known):
        return False
    first = min(known, key=lambda report: report.nanoseconds)
    return _tells_of_a_death(first) and _LIVES_ON not in first.message


def _tells_of_a_death(report: Report) -> bool:
    return any(words in report.message for words in _DEATH_WORDS)


def describe_exit(exit_code: int, *, first: bool) -> str:
    """Describe how a process ended; ``first``: whether that was before the launcher ended any."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if exit_code == -signal.SIGTERM and not first:
        return "ended by the launcher"
    advice = {
        "SIGKILL": "; the kernel does this to a process when memory runs out: see `dmesg`",
        "SIGBUS": "; often a full /dev/shm: see `smd doctor`",
    }
    return f"killed by {name}{advice.get(name, '')}"


def exit_status(failure: Failure) -> int:
    """Return the exit status a shell would show: 128 + n for signal n.

    A rank that had reported its end keeps that status, whatever happened during its cleanup.
    """
    if failure.report is not None:
        return failure.report.exit_code
    return failure.exit_code if failure.exit_code >= 0 else 128 - failure.exit_code


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank for a report; 0 if it is unknown."""
    value = environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0
