"""Which ways to run a case: a few for every test run, all of them on request.

``python -m tests.support.matrix [family ...]`` runs every case with 2 and 4 stages, 1 to 8 microbatches, all
schedules and every placement, alone and with a second replica, and prints what differs from plain PyTorch.
``--steps 20`` trains longer; ``--seconds`` and ``--start`` cut the whole into pieces.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

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
    "attributes",
    "calls",
)
LONG = 12  # steps
SCHEDULES = ("interleaved", "v", "simple", "zero_bubble", "1f1b")
SEARCHED = ("searched", "searched v")  # each for a second or two, so on request only
CHOICES = {"stages": int, "microbatches": int, "placement": str, "schedule": str, "replicas": int}


def some_setups(case: Case, number: int) -> Iterator[Setup]:
    """Some placements on two stages, among them those of the case alone, and one on four.

    Placements, microbatches and schedules vary with ``number``; every second case trains one way longer.
    """
    counts = sorted(case.microbatches, key=(4, 1, 8, 2).index)
    ways = itertools.cycle(itertools.product(counts, SCHEDULES))
    for _ in range(number % (len(counts) * len(SCHEDULES))):
        next(ways)
    usual = [placement for placement in case.placements(2) if placement not in case.fixed.get(2, {})]
    chosen = {usual[(number + i) % len(usual)] for i in range(2)} if usual else set()
    placements = [*sorted(chosen), *case.fixed.get(2, {})]
    steps = itertools.chain([LONG if number % 2 == 0 else 2], itertools.repeat(2))
    for placement, (microbatches, schedule) in zip(placements, ways, strict=False):
        yield Setup(2, microbatches, placement, schedule, steps=next(steps))
    deep = list(case.placements(4))
    if deep:
        microbatches, schedule = next(ways)
        yield Setup(4, microbatches, deep[number % len(deep)], schedule)


def every_setup(case: Case) -> Iterator[Setup]:
    """All placements, numbers of microbatches and schedules, without and with a second replica."""
    for replicas, stages in itertools.product((1, 2), (2, 4)):
        if replicas > 1 and not case.replicas:
            continue
        for schedule, microbatches in itertools.product((*SCHEDULES, *SEARCHED), case.microbatches):
            for placement in case.placements(stages):
                yield Setup(stages, microbatches, placement, schedule, replicas)


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Case, Setup]]:
    """The ways that the command line asks for, always in the same order."""
    for family in options.families or [*FAMILIES, "huggingface"]:
        for case in cases(family):
            if options.case and case.name not in options.case:
                continue
            for setup in every_setup(case):
                if all(
                    getattr(setup, name) in wanted for name in CHOICES if (wanted := getattr(options, name))
                ):
                    yield family, case, replace(setup, steps=options.steps)


def main(arguments: list[str]) -> int:
    """Run what was asked for; how many ways differ."""
    options = _parser().parse_args(arguments)
    ways = [way for way in chosen(options) for _ in range(options.repeat)]
    pools: dict[int, RankPool] = {}
    started = time.monotonic()
    ran = failed = 0
    for family, case, setup in ways[options.start :]:
        if time.monotonic() - started > options.seconds:
            break
        ran += 1
        lines = compare(lambda n: pools.setdefault(n, RankPool(n)), family, case, setup)
        if lines:
            failed += 1
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            print(f"{family}: {_short(lines[0])}{more}", flush=True)
    for pool in pools.values():
        pool.close()
    done, seconds = options.start + ran, time.monotonic() - started
    print(
        f"{ran} ways in {seconds:.0f} s, {failed} differ from plain PyTorch; {done} of {len(ways)} are done"
    )
    if done < len(ways):
        print(f"go on with --start {done}")
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support.matrix", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help="all when none is named")
    parser.add_argument("--case", action="append", help="a case's name; may be given several times")
    for name, kind in CHOICES.items():
        parser.add_argument(f"--{name}", type=kind, nargs="+", help=f"of all {name}, only these")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each way (default 2)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each way (default 1)")
    parser.add_argument("--start", type=int, default=0, help="leave out so many ways at the beginning")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no way after this time")
    return parser


def _short(line: str) -> str:
    """Of what ranks raised, the errors without the tracebacks."""
    first, *rest = line.splitlines()
    return "\n".join([first, *(error[:300] for error in rest if error.startswith("--- rank"))])


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
