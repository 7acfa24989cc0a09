"""The best that was found: what a library without any cost of its own would reach in the same run.

Whoever calls through torch.distributed pays for the call, and whoever moves the data pays for moving them. A
run measures both together, for the same size: torch's do-nothing backend is called through torch.distributed,
and right after it the floor, a plain C++ program (see ``floor``), moves tensors of the same kind, private or
zero-copy. So would a backend without types, checks, sequence numbers and time limits. If somebody does
better, that counts: another candidate through torch, smddp itself among them, or one outside torch, with the
time of a call added.

A run without that pair knows less: no time can be less than the larger of two,

- that of whoever moves the data fastest;
- that of a call.

A call takes what torch's do-nothing backend does. Where that copies (all_gather and the like), the least that
it took for any operation of this size counts. Ranks that share a core call one after the other, so it counts
once for each.

A training step that ranks share takes at least what it computes: a run may have the same step without its
communication.
"""

from __future__ import annotations

import math
import re

from benchmarks.harness.contestants import after_a_call
from benchmarks.harness.results import Results
from benchmarks.harness.table import Ratio

__all__ = ["NO_COMMUNICATION", "allowed", "least_time"]

NO_COMMUNICATION = "opensmd without communication"
STEP = "opensmd over smddp"
CALL, ZERO_COPY = "do-nothing", "zero-copy"
FLOORS = {"smddp": "floor", "smddp zero-copy": "floor zero-copy"}
OUTSIDE_TORCH = ("(C)", "(mpi4py)")  # how the names of candidates that are not called through torch end


def allowed(results: Results, case: str, nbytes: int, wanted: Ratio) -> float | None:
    """The ratio that the best found reaches in one case; None if the run had no floor for the candidate.

    Times above another candidate's (``wanted.above``) have no limit either: the floor is no training step.
    """
    least = least_time(results, case, nbytes, wanted.mine)
    if least is None or wanted.above:
        return None
    others = [t for name in wanted.rivals if (t := results.p50(case, nbytes, name)) is not None]
    return min(others) / least if others else None


def least_time(results: Results, case: str, nbytes: int, mine: str) -> float | None:
    """Microseconds of the best found for what ``mine`` does in one case."""
    times = {name: t for name in results.candidates() if (t := results.p50(case, nbytes, name)) is not None}
    if mine == STEP and {STEP, NO_COMMUNICATION} <= times.keys():
        return min(times[STEP], times[NO_COMMUNICATION])
    calls = [
        t
        for other_case, size in results.cases()
        if size == nbytes and (t := results.p50(other_case, size, CALL))
    ]
    if mine not in times or FLOORS.get(mine) not in times or not calls:
        return None
    call = min(calls) * ranks_a_core(results.layout)
    kinds = [ZERO_COPY in mine, False]  # who can do without zero-copy also could with it
    moved = {name: t for name, t in times.items() if name != CALL and (ZERO_COPY in name) in kinds}
    if after_a_call(FLOORS[mine]) in moved:
        others = {name: t for name, t in moved.items() if name not in FLOORS.values()}
        return min(t + call * name.endswith(OUTSIDE_TORCH) for name, t in others.items())
    return min(times[mine], max(min(moved.values()), call))


def ranks_a_core(layout: str) -> int:
    """How many ranks share the fullest core, from "4 ranks on 2 cores"; 1 if it says nothing of the kind."""
    found = re.match(r"(\d+) ranks on (\d+) core", layout)
    return math.ceil(int(found[1]) / int(found[2])) if found else 1
