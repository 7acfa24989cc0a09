"""Which ways to run a case: a few for every test run, all of them on request.

``python -m tests.support.matrix [family ...]`` runs every case with 1 to 4 stages, 1 to 8 microbatches, both
schedules, every placement, and replicas, and prints what differs from plain PyTorch.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from tests.ranks.models.case import Case
from tests.support.equality import Setup, cases, compare
from tests.support.ranks import RankPool

__all__ = ["FAMILIES", "every_setup", "some_setups"]

FAMILIES = (
    "wiring",
    "branches",
    "containers",
    "inplace",
    "buffers",
    "recurrent",
    "attention",
    "precision",
    "checkpointing",
    "hooks",
    "functions",
    "parameters",
    "calls",
)
SCHEDULES = ("simple", "interleaved")


def some_setups(case: Case, number: int) -> Iterator[Setup]:
    """Some placements on two stages, among them those of the case alone, and one on four.

    Placements, microbatches and schedules vary with ``number``.
    """
    counts = sorted(case.microbatches, key=(4, 1, 8, 2).index)
    ways = itertools.cycle(itertools.product(counts, ("interleaved", "simple")))
    for _ in range(number % 8):
        next(ways)
    usual = [each for each in case.placements(2) if each not in case.fixed.get(2, {})]
    chosen = {usual[(number + i) % len(usual)] for i in range(2)} if usual else set()
    placements = [*sorted(chosen), *case.fixed.get(2, {})]
    for placement, (microbatches, schedule) in zip(placements, ways, strict=False):
        yield Setup(2, microbatches, placement, schedule)
    deep = list(case.placements(4))
    if deep:
        microbatches, schedule = next(ways)
        yield Setup(4, microbatches, deep[number % len(deep)], schedule)


def every_setup(case: Case) -> Iterator[Setup]:
    """All placements, numbers of microbatches and schedules; replicas with two stages."""
    for stages, schedule, microbatches in itertools.product((2, 4), SCHEDULES, case.microbatches):
        for placement in case.placements(stages):
            yield Setup(stages, microbatches, placement, schedule)
    if not case.replicas:
        return
    for placement, microbatches in itertools.product(case.placements(2), {1, 4} & set(case.microbatches)):
        yield Setup(2, microbatches, placement, replicas=2)


def main(families: list[str]) -> int:
    """Run everything; the number of setups that differ."""
    pools: dict[int, RankPool] = {}
    failed = ran = 0
    for family in families:
        started = time.monotonic()
        for case in cases(family):
            for setup in every_setup(case):
                ran += 1
                lines = compare(lambda n: pools.setdefault(n, RankPool(n)), family, case, setup)
                failed += bool(lines)
                for line in lines:
                    print(f"{family}: {_short(line)}", flush=True)
        print(f"{family}: {time.monotonic() - started:.0f} s", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{ran} setups, {failed} differ from plain PyTorch")
    return failed


def _short(line: str) -> str:
    """Of what ranks raised, the errors without the tracebacks."""
    first, *rest = line.splitlines()
    return "\n".join([first, *(each[:300] for each in rest if each.startswith("--- rank"))])


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or [*FAMILIES, "huggingface"])))
