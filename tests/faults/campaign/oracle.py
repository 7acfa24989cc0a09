"""What every rank must have seen of a case; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.faults.campaign.cases import DEADLY, MESSAGES, MISMATCHES, SILENT, Case
from tests.faults.campaign.hosts import host_of
from tests.faults.campaign.operations import SHOWN_AS
from tests.faults.campaign.records import Failure, Fate

__all__ = [
    "GRACE",
    "KINDS",
    "LONGEST_END",
    "Finding",
    "Seen",
    "blamed",
    "blamed_on_hosts",
    "judge",
    "last_line",
]

GRACE_ON_HOSTS = 5.0
GRACE = 60.0  # seconds that an error may come after the timeout, on a busy machine
LONGEST_END = 120.0  # of a process that has reported: an interpreter looks through all that torch is made of
MOMENT = 0.1  # seconds in which members of a group hear of what one has found
ABORTED = "fails because the group was aborted"  # says smddp to who comes after that

KINDS = (
    "hang",  # no error within the timeout and the grace
    "wrong numbers",
    "no error",  # calls went on as if nothing were
    "error without cause",
    "wrong rank",  # the error does not name the rank that misbehaved, by its global rank, or names others
    "wrong operation",
    "wrong class",  # of the exception
    "end",  # a process does not end as it should
    "not started",
)


@dataclass(frozen=True)
class Finding:
    """One broken promise."""

    kind: str
    text: str


@dataclass
class Seen:
    """The oracle's reading of a case.

    Attributes:
        findings: every broken promise.
        seconds: from the fault to the last rank's error, for faults that end the group.
    """

    findings: list[Finding] = field(default_factory=list)
    seconds: float | None = None

    def add(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, text))


def judge(case: Case, fates: list[Fate], struck: float, *, smddp: bool, started: bool) -> Seen:
    """Compare what became of the ranks with what is promised.

    Args:
        case: what was to happen.
        fates: by rank.
        struck: when the fault began, on the monotonic clock.
        smddp: whether errors are to name ranks and operations as the backend promises; else it is only noted
            whether they name the victim and the operation anywhere.
        started: whether all groups were made.
    """
    seen = Seen()
    if not started:
        seen.add("not started", "; ".join(last_line(fate.output) for fate in fates))
        return seen
    for rank, fate in enumerate(fates):
        _judge_end(case, rank, fate, seen)
        if fate.record is not None:
            for wrong in fate.record.wrong:
                seen.add(
                    "no error" if "after the fault" in wrong else "wrong numbers", f"rank {rank}: {wrong}"
                )
            if fate.record.trouble:
                seen.add("error without cause", f"rank {rank}: {fate.record.trouble}")
        if rank in case.members:
            _judge_failure(case, rank, fates, struck, seen, smddp=smddp)
    return seen


def _judge_end(case: Case, rank: int, fate: Fate, seen: Seen) -> None:
    """Whether the process has reported and ended as it should."""
    if rank == case.victim and case.fault in (*SILENT, "kill"):
        return
    expected = {"exit": 3, "exception": 1}.get(case.fault, 0) if rank == case.victim else 0
    if fate.exit_code is None:
        kind = "hang" if fate.record is None else "end"
        seen.add(kind, f"rank {rank} did not end: {fate.output[-3000:]}")
    elif fate.exit_code != expected:
        seen.add(
            "end", f"rank {rank} ended with {fate.exit_code} instead of {expected}: {fate.output[-1500:]}"
        )
    elif fate.seconds_to_end > LONGEST_END:
        seen.add("end", f"rank {rank} took {fate.seconds_to_end:.1f} s to end")


def _must_fail(case: Case, rank: int) -> bool:
    if case.is_refused_message:
        return rank == case.parties[1]
    if rank == case.victim and case.fault in DEADLY + SILENT:
        return False
    return case.ends_the_group


def _may_fail(case: Case, rank: int) -> bool:
    return _must_fail(case, rank) or (rank == case.victim and case.ends_the_group)


def _judge_failure(
    case: Case, rank: int, fates: list[Fate], struck: float, seen: Seen, *, smddp: bool
) -> None:
    """Whether a member has failed as it should."""
    fate = fates[rank]
    failure = fate.record.failure if fate.record is not None else None
    if failure is None:
        if (
            _must_fail(case, rank)
            and fate.record is not None
            and not any("after the fault" in w for w in fate.record.wrong)
        ):
            seen.add("no error", f"rank {rank}: all {fate.record.completed} calls succeeded")
        return
    if not _may_fail(case, rank):
        seen.add("error without cause", f"rank {rank}: {failure.text}")
        return
    if rank == case.victim and not _must_fail(case, rank):
        return
    seconds = failure.ended - max(failure.began, struck)
    if seconds > case.timeout + (GRACE_ON_HOSTS if case.on_hosts else GRACE):
        seen.add("hang", f"rank {rank}: the error came {seconds:.1f} s after the fault: {failure.text}")
    if not case.is_refused_message:
        seen.seconds = max(seen.seconds or 0.0, failure.ended - struck)
    if smddp and failure.kind != "DistBackendError":
        seen.add("wrong class", f"rank {rank}: {failure.kind}: {failure.text}")
    judge_text = _judge_text_of_hosts if case.on_hosts and smddp else _judge_text
    judge_text(case, rank, failure, fates, seen, smddp=smddp)
    if smddp and not case.is_refused_message and fate.record is not None and fate.record.again is None:
        seen.add("no error", f"rank {rank}: a call after the error succeeded")


def _kept_away(fates: list[Fate]) -> set[int]:
    """Ranks that a busy machine had kept from a call when others lost patience: their own errors say so."""
    failed = {
        rank: (fate.record.failure.text, fate.record.completed)
        for rank, fate in enumerate(fates)
        if fate.record is not None and fate.record.failure is not None
    }
    waited = [calls for text, calls in failed.values() if "Timed out" in text and ABORTED not in text]
    longest = max(waited, default=-1)
    return {rank for rank, (text, calls) in failed.items() if ABORTED in text and calls <= longest}


def _late(case: Case, failure: Failure, fates: list[Fate]) -> set[int]:
    """Ranks that have not arrived where another waited in vain, and not by their own fault: it may say so.

    A busy machine kept them from the call, or they wait for a message themselves.
    """
    late = _kept_away(fates)
    for rank, fate in enumerate(fates):
        own = fate.record.failure if fate.record is not None else None
        if own is not None and (own.operation in MESSAGES or own.began > failure.ended - 2 * MOMENT):
            late.add(rank)
    expired = "Timed out" in failure.text or failure.ended - failure.began > case.timeout - MOMENT
    return late if expired else set()


def _judge_text(
    case: Case, rank: int, failure: Failure, fates: list[Fate], seen: Seen, *, smddp: bool
) -> None:
    names = blamed(failure.text) if smddp else {int(n) for n in re.findall(r"[Rr]ank (\d+)", failure.text)}
    accused = case.accused
    if case.fault in MISMATCHES and len(accused) == 1 and not case.is_refused_message:
        right = case.victim in names  # beside those who called something else
    else:
        accused |= _kept_away(fates)
        names -= _late(case, failure, fates) - accused
        right = bool(names & accused) and (names <= accused or not smddp)
    if not right:
        seen.add("wrong rank", f"rank {rank}: {sorted(names)} for {sorted(accused)}: {failure.text}")
    own = (f"on rank {rank}", f"Rank {rank} successfully reached", f"Rank {case.victim} failed to pass")
    if smddp and not any(words in failure.text for words in own) and case.fault not in MISMATCHES:
        seen.add("wrong rank", f"rank {rank} is not named as the one that is told: {failure.text}")
    shown = SHOWN_AS.get(failure.operation, (failure.operation,))
    title = failure.text.split(" on rank ")[0] if smddp else failure.text
    strayed = rank == case.victim and case.fault == "other operation"
    if not strayed and not any(name in title for name in shown):
        seen.add("wrong operation", f"rank {rank} in {failure.operation}: {failure.text}")


def _judge_text_of_hosts(
    case: Case, rank: int, failure: Failure, fates: list[Fate], seen: Seen, *, smddp: bool
) -> None:
    names = blamed_on_hosts(failure.text)
    across = {other for other in case.members if host_of(other, case.ranks) != host_of(rank, case.ranks)}
    accused = across if case.fault == "cut link" else case.accused
    if case.fault in MISMATCHES:
        right = bool(names & accused)
    elif case.fault == "kill" and case.victim == 0:
        # The store of a job without a launcher ends with rank 0, and with it all reports.
        right = bool(names & accused)
    elif case.fault == "stop" and case.victim == 0:
        right = bool(
            names
        )  # whom this rank waits for, who may wait for rank 0: the stopped store tells no more
    else:
        right = bool(names & accused) and names - _late(case, failure, fates) <= accused
    if not right:
        seen.add("wrong rank", f"rank {rank}: {sorted(names)} for {sorted(accused)}: {failure.text}")
    elsewhere = {other for other in names if not _named_with_host(other, case.ranks, failure.text)}
    if elsewhere:
        seen.add("wrong rank", f"rank {rank}: {sorted(elsewhere)} without their hosts: {failure.text}")
    shown = SHOWN_AS.get(failure.operation, (failure.operation,))
    shown += ("receive",) if "recv" in shown else ()
    strayed = rank == case.victim and case.fault == "other operation"
    if not strayed and not any(name in failure.text for name in shown):
        seen.add("wrong operation", f"rank {rank} in {failure.operation}: {failure.text}")


def _named_with_host(rank: int, ranks: int, text: str) -> bool:
    """Hosts of one name are numbered, as those of a campaign are."""
    return re.search(rf"rank {rank} on [^ ,;:]+#{host_of(rank, ranks) + 1}\b", text) is not None


def blamed_on_hosts(text: str) -> set[int]:
    """Likewise of a group that spans hosts."""
    plain = re.sub(r" on [^ ,;:)]+#\d+", "", text)
    if silent := re.search(r"no answer from: ([^;]*)", plain):
        return {int(number) for number in re.findall(r"rank (\d+)", silent[1])}
    waited_for = re.findall(r"(?:not arrived|nothing taken by|lost the connection to):? ([^;:(]*)", plain)
    waited_for += re.findall(r"(?:receive from|send to) (rank \d+) .*Timed out", plain)
    waited_for += re.findall(r"((?:rank \d+(?:, | and )?)+) have died", plain)
    waited_for += re.findall(r"(rank \d+) (?:sends|expects) \d+ bytes of \w+ instead", plain)
    numbers = re.findall(r"rank (\d+)", " ".join(waited_for))
    return {int(number) for number in numbers} | blamed(plain)


def blamed(text: str) -> set[int]:
    """The ranks that a message of the backend holds responsible."""
    numbers = re.findall(r"rank (\d+) has (?:died|left)", text)
    numbers += re.findall(r"abort\(\) was called on rank (\d+)", text)
    numbers += re.findall(r"rank (\d+) sent ", text)
    for who in re.findall(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text):
        numbers += who.split(", ")
    # Who has arrived waits for who has not.
    late = re.search(r"not arrived: ([^;]*(?:;[^;]*\)[^;]*)*?)(?:; arrived|$)", text) or re.search(
        r"(?:not finished|matches|does not receive): (.*)", text
    )
    if late:
        numbers += re.findall(r"rank (\d+) \(", late[1])
    for who in re.findall(r"(rank [^;:]*?) called |rank (\d+ sends \d+ elements to rank \d+)", text):
        numbers += re.findall(r"(?:rank )?(\d+)\b(?! elements)", " ".join(who))
    return {int(number) for number in numbers}


def last_line(text: str) -> str:
    """What a process wrote last."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
