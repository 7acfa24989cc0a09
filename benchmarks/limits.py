"""What the machine allows: the ratio that a library without any cost of its own would reach in the same run.

Whoever calls through torch.distributed pays for the call, and whoever moves the data pays for moving them. So
no time can be less than the larger of two that the run has measured itself, for the same size:

- that of whoever moves the data fastest, nearly always the floor, a plain C++ program (see ``floor``), for
  tensors of the same kind: private or zero-copy;
- that of torch's do-nothing backend. Where it does copy (all_gather and the like), the least that it took for
  any operation of this size counts: that of a call in which it does nothing. Ranks that share a core call one
  after the other, so it counts once for each of them.

Adding the two would be nearer to the truth for large messages; the larger one is certain.
"""

from __future__ import annotations

import math
import re

from benchmarks.harness.results import Results
from benchmarks.harness.table import Ratio

__all__ = ["allowed", "least_time"]

CALL, ZERO_COPY = "do-nothing", "zero-copy"
FLOORS = {"smddp": "floor", "smddp zero-copy": "floor zero-copy"}


def allowed(results: Results, case: str, nbytes: int, wanted: Ratio) -> float | None:
    """The ratio that the machine allows in one case; None if the run had no floor for the candidate.

    Times above another candidate's (``wanted.above``) have no limit either: the floor is no training step.
    """
    least = least_time(results, case, nbytes, wanted.mine)
    if least is None or wanted.above:
        return None
    others = [t for name in wanted.rivals if (t := results.p50(case, nbytes, name)) is not None]
    return min(others) / least if others else None


def least_time(results: Results, case: str, nbytes: int, mine: str) -> float | None:
    """Microseconds that the machine and torch need for what ``mine`` does in one case."""
    times = {name: t for name in results.candidates() if (t := results.p50(case, nbytes, name)) is not None}
    calls = [t for each, size in results.cases() if size == nbytes and (t := results.p50(each, size, CALL))]
    if mine not in times or FLOORS.get(mine) not in times or not calls:
        return None
    kinds = [ZERO_COPY in mine, False]  # who can do without zero-copy also could with it
    moved = min(t for name, t in times.items() if name != CALL and (ZERO_COPY in name) in kinds)
    return min(times[mine], max(moved, min(calls) * ranks_a_core(results.layout)))


def ranks_a_core(layout: str) -> int:
    """How many ranks share the fullest core, from "4 ranks on 2 cores"; 1 if it says nothing of the kind."""
    found = re.match(r"(\d+) ranks on (\d+) core", layout)
    return math.ceil(int(found[1]) / int(found[2])) if found else 1
