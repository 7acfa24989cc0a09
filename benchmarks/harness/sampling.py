"""How samples are taken: all candidates of a case in turn, a block of calls each, many rounds of that.

A sample is the time from the moment the last rank finished one call to the moment the last rank finished the
next (the first call of a block counts from the moment the last rank began it). So no rank's early return from
a buffered send makes a collective look faster than it is.

No candidate may gain by whom it comes after: some work on the same tensors, and up to some 16 MiB it matters
what the caches hold. So every block begins with calls that are not timed, and the order of the candidates is
drawn anew every round. Blocks do not count during which the host had moved our cores apart, or lent half of
one to somebody else (``cores``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.cores import Cores
from benchmarks.harness.meeting import MAX_CALLS, Meeting, Stamps

__all__ = ["UNTIL_STEADY", "Candidate", "Plan", "run_block", "sample", "timed"]

Block = Callable[[Stamps], None]

# Seconds. Others compute on half of a core for some 2 to 30 ms at a time: longer blocks meet them anyway. The
# longest of a case's blocks decides for all, so that none is measured in a better time than another.
LONG_BLOCK = 30e-3

# Calls after others' tensors and threads have had the caches and cores: zero-copy all_reduce of 16 MiB then
# takes 1.2, 0.8, 0.55 and from then on 0.45 ms, gloo with 1 MiB 3.8, 1.9, 2.7 and from then on mostly 0.5.
UNTIL_STEADY = 3


@dataclass(frozen=True)
class Candidate:
    """One contestant in one case: ``block`` fills n + 1 time stamps around n calls; ``check`` raises if the
    result of a call is wrong."""

    name: str
    block: Block
    check: Callable[[], None] | None = None


@dataclass(frozen=True)
class Plan:
    """How long to measure: seconds for all candidates of a case together, and the limits of that."""

    seconds: float = 3.0
    min_rounds: int = 5
    max_rounds: int = 60
    block_seconds: float = 400e-6
    max_block: int = 20
    untimed: int = 1  # calls at the beginning of every block


def timed(call: Callable[[], object]) -> Block:
    """A block for an operation that Python calls."""

    def block(stamps: Stamps) -> None:
        clock = time.perf_counter_ns
        stamps[0] = clock()
        for i in range(1, len(stamps)):
            call()
            stamps[i] = clock()

    return block


def sample(
    candidates: Sequence[Candidate], meeting: Meeting, cores: Cores, plan: Plan
) -> dict[str, list[float]]:
    """Microseconds a call for every candidate; the same lists on every rank.

    Every rank decides alike because all that decisions rest on comes from the shared board.
    """
    cores.new_case()
    for candidate in candidates:
        if candidate.check is not None:
            candidate.check()
    cores.wait_for_calm()
    one = {c.name: _estimate(c, meeting, plan) for c in candidates}
    calls = {name: _calls_in_block(seconds, plan) for name, seconds in one.items()}
    block_seconds = {name: one[name] * (calls[name] + plan.untimed) for name in one}
    if max(block_seconds.values()) > LONG_BLOCK:
        cores.need_not_be_alone()
    round_seconds = sum(block_seconds.values())
    rounds = int(min(plan.max_rounds, max(plan.min_rounds, plan.seconds / round_seconds)))
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    draw = random.Random(len(candidates))  # the same order on every rank

    def calm_block(candidate: Candidate) -> list[float]:
        name = candidate.name
        while True:
            patient = cores.wait_for_calm()
            values = run_block(candidate, meeting, calls[name], plan.untimed)
            if not patient or cores.calm():
                return values
            cores.throw_away(block_seconds[name])

    for _ in range(rounds):
        for candidate in draw.sample(candidates, len(candidates)):
            samples[candidate.name] += calm_block(candidate)
    return samples


def _estimate(candidate: Candidate, meeting: Meeting, plan: Plan) -> float:
    """Seconds one call takes, roughly: the median of a few."""
    return float(np.median(run_block(candidate, meeting, 5, plan.untimed))) * 1e-6


def _calls_in_block(seconds: float, plan: Plan) -> int:
    return int(min(plan.max_block, max(2, plan.block_seconds / max(seconds, 1e-9)), MAX_CALLS))


def run_block(candidate: Candidate, meeting: Meeting, calls: int, untimed: int) -> list[float]:
    """Microseconds of each of ``calls`` calls, after some that are not timed; the same on all ranks."""
    meeting.wait()
    candidate.block(np.empty(untimed + 1, dtype=np.int64))
    meeting.wait()
    candidate.block(meeting.mine(calls))
    meeting.wait()
    last = meeting.everyone(calls).max(axis=0)
    intervals = np.diff(last) / 1e3
    meeting.wait()
    return [float(value) for value in intervals]
