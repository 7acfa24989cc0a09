"""What the machine allows: the ratio that a library without any cost of its own would reach in the same run.

Whoever calls through torch.distributed pays for the call, and whoever moves the data pays for moving them. So
no time can be less than the larger of two that the run has measured itself, for the same size:

- that of the floor, a plain C++ program (see ``floor``), for tensors of the same kind: private or zero-copy;
- that of torch's do-nothing backend. Where it does copy (all_gather and the like), the least that it took for
  any operation of this size counts: that of a call in which it does nothing.

Adding the two would be nearer to the truth for large messages; the larger one is certain. If the candidate
was faster than that (the floor is a program too, and both have noise), its own time is the limit.
"""

from __future__ import annotations

from benchmarks.harness.results import Results
from benchmarks.harness.table import Ratio

__all__ = ["allowed", "least_time"]

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
    own, floor = results.p50(case, nbytes, mine), results.p50(case, nbytes, FLOORS.get(mine, ""))
    calls = [
        t for each, size in results.cases() if size == nbytes and (t := results.p50(each, size, "do-nothing"))
    ]
    if own is None or floor is None or not calls:
        return None
    return min(own, max(floor, min(calls)))
