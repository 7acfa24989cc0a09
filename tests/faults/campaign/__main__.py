"""``python -m tests.faults.campaign --trials 500 --seed 1``: run cases, print what broke, count by fault."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.faults.campaign.calls import run_case
from tests.faults.campaign.cases import FATAL, MISMATCHES, Case, draw
from tests.support.ranks import Outcome, run_once

GRACE = 2.0  # seconds that an error may come after the timeout


def judge(case: Case, outcomes: list[Outcome], timeout: float) -> list[str]:
    """What is wrong with the outcomes of a case; nothing if all is as promised."""
    found = []
    for rank, outcome in enumerate(outcomes):
        if outcome.kind == "value":
            found += [f"rank {rank}: {wrong}" for wrong in outcome.value]
        if rank == case.victim and case.fault in FATAL:
            continue
        must_fail = rank in case.members and case.fault in (*FATAL, *MISMATCHES)
        if not must_fail:
            if outcome.kind != "value":
                found.append(f"rank {rank} failed without a cause: {outcome.text[-300:]}")
        elif outcome.kind == "timeout" or outcome.seconds > timeout + GRACE:
            found.append(f"rank {rank} hung: {outcome.kind} after {outcome.seconds:.1f} s")
        elif outcome.kind == "error" and f"rank {case.victim}" not in str(outcome.value):
            found.append(f"rank {rank} is not told of rank {case.victim}: {outcome.value}")
        elif outcome.kind == "error" and case.operation not in str(outcome.value):
            found.append(f"rank {rank} is not told the operation: {outcome.value}")
        # Another rank's death may come when a call has all that it needs; a root needs nobody.
        elif outcome.kind == "value" and case.fault in MISMATCHES:
            found.append(f"rank {rank} saw no mismatch")
    return found


def run(case: Case, backend: str, timeout: float) -> list[str]:
    """Run one case on fresh processes and judge it."""
    silent = [case.victim] if case.fault in FATAL else []
    outcomes = run_once(
        case.ranks,
        run_case,
        case,
        timeout,
        backend=backend,
        timeout=4 * timeout + 20,
        group_timeout=30.0,
        silent=silent,
    )
    return judge(case, outcomes, timeout)


def main() -> int:
    """Run the campaign; the exit code says whether every case was as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backend", default="smddp", choices=["smddp", "gloo"])
    parser.add_argument("--timeout", type=float, default=3.0, help="of the groups, in seconds")
    options = parser.parse_args()
    broken: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    started = time.monotonic()
    for trial in range(options.trials):
        case = draw(options.seed, trial, options.ranks)
        found = run(case, options.backend, options.timeout)
        cases[case.fault] += 1
        broken[case.fault] += bool(found)
        if found:
            print(f"{trial}: {case}", *found, sep="\n    ", flush=True)
    for fault, count in sorted(cases.items()):
        print(f"{fault:16} {count:4} cases, {broken[fault]:3} broken")
    print(f"{sum(broken.values())} of {options.trials} broken in {time.monotonic() - started:.0f} s")
    return int(sum(broken.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
