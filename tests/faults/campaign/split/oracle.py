"""What every rank, and the disk, must have seen of a case of split training; pure."""

from __future__ import annotations

import math
import re

from tests.faults.campaign.oracle import GRACE, LONGEST_END, Seen, last_line
from tests.faults.campaign.records import Failure, Fate
from tests.faults.campaign.split.aftermath import Aftermath
from tests.faults.campaign.split.cases import SplitCase
from tests.faults.campaign.split.member import SplitRecord

__all__ = ["judge"]

AT_ONCE = 0.5  # seconds between errors of ranks whose patience ends together: each names whom it waited for
WORDS = {  # one of which says what was going on
    "step": ("microbatch", "the step", "earlier step", "all_gather", "reduce_scatter", "all_reduce"),
    "save": ("checkpoint", "saved", "barrier", "all_gather", "gather", "recv", "pipeline"),
    "end": ("barrier",),
}


def judge(case: SplitCase, fates: list[Fate], struck: float, after: Aftermath, *, started: bool) -> Seen:
    """Compare what became of the ranks and of the checkpoints with what is promised; as for collectives."""
    seen = Seen()
    if not started:
        seen.add("not started", "; ".join(last_line(fate.output) for fate in fates))
        return seen
    for rank, fate in enumerate(fates):
        _judge_end(case, rank, fate, seen)
        if isinstance(fate.record, SplitRecord):
            _judge_numbers(case, rank, fate.record, after, seen)
            _judge_failure(case, rank, fates, struck, seen)
    _judge_checkpoints(case, fates, after, seen)
    return seen


def _judge_end(case: SplitCase, rank: int, fate: Fate, seen: Seen) -> None:
    if rank == case.victim and case.fault in ("kill", "stop", "absent"):
        return
    expected = {"exit": 3, "exception": 1}.get(case.fault, 0) if rank == case.victim else 0
    if fate.exit_code is None:
        seen.add("hang" if fate.record is None else "end", f"rank {rank} did not end: {fate.output[-3000:]}")
    elif fate.exit_code != expected:
        text = f"rank {rank} ended with {fate.exit_code} instead of {expected}: {fate.output[-1500:]}"
        seen.add("end", text)
    elif fate.seconds_to_end > LONGEST_END:
        seen.add("end", f"rank {rank} took {fate.seconds_to_end:.1f} s to end")


def _judge_numbers(case: SplitCase, rank: int, record: SplitRecord, after: Aftermath, seen: Seen) -> None:
    """Losses of completed steps: the same bits, unless sums of several microbatches are rounded otherwise."""
    if not after.losses:
        return
    for step, loss in enumerate(record.losses):
        expected = after.losses[record.replica][step]
        if case.microbatches == 2 and case.replicas == 1 and case.sharing == 1:
            right = loss == expected
        else:
            right = math.isclose(loss, expected, rel_tol=1e-12)
        if not right:
            seen.add("wrong numbers", f"rank {rank}: the loss of step {step} is {loss}, not {expected}")


def _judge_failure(case: SplitCase, rank: int, fates: list[Fate], struck: float, seen: Seen) -> None:
    record = fates[rank].record
    assert isinstance(record, SplitRecord)
    failure = record.failure
    victims = fates[case.victim].record
    # Others may lose patience with a victim that a busy machine keeps from its fault.
    gone = struck > 0 or (case.expires and victims is not None and victims.failure is not None)
    must_fail = case.ends_the_training and gone and rank != case.victim
    if failure is None:
        if must_fail:
            seen.add("no error", f"rank {rank}: all {record.completed} steps succeeded")
        if case.fault == "full disk":
            _judge_refusal(case, rank, record, seen)
        return
    if record.trouble or not must_fail:
        seen.add(
            "error without cause", f"rank {rank} in {failure.operation}: {failure.text} {record.trouble}"
        )
        return
    if failure.ended - max(failure.began, struck) > case.timeout + GRACE:
        late = failure.ended - max(failure.began, struck)
        seen.add("hang", f"rank {rank}: the error came {late:.1f} s after the fault: {failure.text}")
    seen.seconds = max(seen.seconds or 0.0, failure.ended - struck)
    _judge_text(case, rank, failure, fates, seen)
    if record.again is None:
        seen.add("no error", f"rank {rank}: a step after the error succeeded")


def _judge_refusal(case: SplitCase, rank: int, record: SplitRecord, seen: Seen) -> None:
    writes = _writes(case, rank, record)
    if not _writes(case, case.victim, record):
        return  # it had nothing to write
    if rank == case.victim and writes and not record.refused.startswith("OSError"):
        seen.add("no error", f"rank {rank} had no room for its file, and the save said {record.refused!r}")
    elif rank != case.victim and f"rank {case.victim}" not in record.refused:
        seen.add("wrong rank", f"rank {rank} was told {record.refused!r} of rank {case.victim}'s full disk")


def _writes(case: SplitCase, rank: int, record: SplitRecord) -> bool:
    """Whether a rank writes tensors: those of the first replica do, or the first of them alone."""
    return rank < case.partitions * case.sharing if case.partial else rank == 0


def _judge_text(case: SplitCase, rank: int, failure: Failure, fates: list[Fate], seen: Seen) -> None:
    """A message names the victim, or a rank that has failed because of it, and what was going on."""
    names = {int(number) for number in re.findall(r"\b[Rr]ank (\d+)", failure.text)}
    failed = {
        other
        for other, fate in enumerate(fates)
        if fate.record is not None
        and fate.record.failure
        and fate.record.failure.ended < failure.ended + AT_ONCE
    }
    if not names & ({case.victim} | failed - {rank}):
        seen.add("wrong rank", f"rank {rank}: {sorted(names)} for {case.victim}: {failure.text}")
    if not any(word in failure.text for word in WORDS[failure.operation]):
        seen.add("wrong operation", f"rank {rank} in {failure.operation}: {failure.text}")


def _judge_checkpoints(case: SplitCase, fates: list[Fate], after: Aftermath, seen: Seen) -> None:
    """The newest checkpoint is the last that a rank saw written, or the one under way, and whole."""
    records = [fate.record for fate in fates if isinstance(fate.record, SplitRecord)]
    saved = max((record.saved for record in records), default=-1)
    begun = max((record.completed - 1 for record in records), default=-1)
    possible = {saved, *(step for step in range(saved + 1, begun + 2) if case.saves_after(step))}
    if after.wrong:
        seen.add("wrong numbers", f"the newest checkpoint: {after.wrong}")
    elif after.resumed not in possible:
        seen.add("wrong numbers", f"resumed from step {after.resumed}, not from one of {sorted(possible)}")
