"""``python -m benchmarks.targets``: what the project wants to reach, and the newest results beside it.

A target names a candidate, its rivals and a factor. Over all cases that it covers, and over the runs with
every MPI, the smallest ratio counts: a target is met in the worst case or not at all. Where it is missed,
the fastest that was found in the same run (see ``limits``) tells whether a faster library could have met it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collectives.operations import OPERATIONS
from benchmarks.harness.results import Results, human_bytes
from benchmarks.harness.table import Ratio, ratio, ratio_text
from benchmarks.limits import allowed

__all__ = ["TARGETS", "Found", "Target", "all_found", "markdown", "verdict", "worst"]

OUT = Path("out/bench")
KIB, MIB = 1 << 10, 1 << 20
MPI = ["MPICH (C)", "MPICH (mpi4py)", "Intel MPI (C)", "Intel MPI (mpi4py)"]


@dataclass(frozen=True)
class Target:
    """``mine`` at least ``factor`` times as fast as the best of ``rivals``, from ``low`` to ``high`` bytes.

    ``stem`` is how the names of the results begin; ``case`` is an operation, or all; with ``above`` only the
    time above that candidate's counts.
    """

    stem: str
    mine: str
    rivals: Sequence[str]
    factor: float
    low: int = 0
    high: int = 1 << 62
    above: str = ""
    case: str = ""

    @property
    def text(self) -> str:
        """In words."""
        sizes = "every size" if self.high > 1 << 60 and not self.low else f"from {human_bytes(self.low)}"
        if self.high <= 1 << 60:
            sizes = f"{human_bytes(self.low)} to {human_bytes(self.high)}"
            if self.low == self.high:
                sizes = human_bytes(self.low)
        rival = "MPI" if self.rivals is MPI else " or ".join(self.rivals)
        above = f", time above {self.above}" if self.above else ""
        what = f"{self.stem}, {self.case}" if self.case else self.stem
        return f"{what}: {self.mine} {self.factor:.3g}x as fast as {rival}, {sizes}{above}"


@dataclass(frozen=True)
class Found:
    """A ratio measured, where, and that of the fastest program that was found for it, if there is one."""

    ratio: float
    place: str
    allowed: float | None = None


def _all_reduce() -> list[Target]:
    two, four, zero = "allreduce-2", "allreduce-4", "smddp zero-copy"
    against_gloo = [(4, 256 * KIB, 20), (MIB, MIB, 12), (4 * MIB, 4 * MIB, 15), (16 * MIB, 16 * MIB, 8)]
    against_mpi = [(64 * KIB, 256 * KIB, 1), (MIB, MIB, 1.3), (4 * MIB, 256 * MIB, 2)]
    zero_gloo = [(MIB, 4 * MIB, 40), (16 * MIB, 16 * MIB, 20), (64 * MIB, 256 * MIB, 10)]
    return [
        *(Target(two, "smddp", ["gloo"], f, low, high) for low, high, f in against_gloo),
        Target(two, "smddp", ["gloo"], 6, 64 * MIB, 256 * MIB),
        Target(two, "smddp", ["do-nothing"], 0.5, 4, 4),
        *(Target(two, "smddp", MPI, f, low, high) for low, high, f in against_mpi),
        *(Target(two, zero, ["gloo"], f, low, high) for low, high, f in zero_gloo),
        Target(two, zero, MPI, 4, MIB, 256 * MIB),
        Target(two, "smddp", ["floor"], 1 / 1.3, 64 * MIB, 64 * MIB),
        Target(four, "smddp", ["gloo"], 10, 4, 4 * MIB),
        Target(four, "smddp", ["gloo"], 5, 16 * MIB, 256 * MIB),
        Target(four, "smddp", MPI, 1.5),
        Target("allreduce-dtypes", "smddp", ["gloo"], 1),
    ]


TARGETS = [
    *_all_reduce(),
    *(Target("collectives-2", "smddp", ["gloo"], 8, case=operation.name) for operation in OPERATIONS),
    *(Target("collectives-2", "smddp", MPI, 1, case=operation.name) for operation in OPERATIONS),
    Target("ddp-2", "smddp zero-copy", ["gloo"], 4, 90 * MIB, 200 * MIB, above="do-nothing"),
    Target("ddp-2", "smddp zero-copy", ["gloo"], 1),
    Target("tensor-parallel-2", "opensmd over smddp", ["DTensor over gloo"], 1.3),
    Target("tensor-parallel-2", "opensmd over smddp", ["DTensor over smddp"], 1),
    Target("sharded-2", "opensmd over smddp", ["FSDP2 over gloo"], 1.5),
    Target("sharded-2", "opensmd over smddp", ["FSDP2 over smddp"], 1),
]


def all_found(target: Target, results: Sequence[Results]) -> list[Found]:
    """The ratio in every case that the target covers, the smallest first."""
    want = Ratio("", target.mine, target.rivals, target.above)
    found = []
    for result in results:
        for case, nbytes in result.cases():
            covered = target.case in ("", case) and target.low <= nbytes <= target.high
            if covered and (r := ratio(result, case, nbytes, want)) is not None:
                place = f"{case}, {human_bytes(nbytes)}"
                found.append(Found(r, place, allowed(result, case, nbytes, want)))
    return sorted(found, key=lambda f: f.ratio)


def worst(target: Target, results: Sequence[Results]) -> Found | None:
    """The smallest ratio over the target's cases; None if nothing was measured."""
    return next(iter(all_found(target, results)), None)


def verdict(factor: float, found: Sequence[Found]) -> str:
    """Whether a target is met, and if not, whether anything that was found would have met it.

    ``found`` begins with the worst case. Nothing would have only if that is so wherever the target is missed.
    """
    missed = [item for item in found if item.ratio < factor]
    if not missed:
        return "yes"
    could = [one for one in missed if one.allowed is None or one.allowed >= factor]
    if not could:
        return f"no, the best found reaches {ratio_text(missed[0].allowed)}"
    if could[0] is missed[0]:
        return "no"
    here = f"{ratio_text(could[0].ratio)} ({could[0].place})"
    return f"no, and at {here} the best found reaches {ratio_text(could[0].allowed)}"


def missing(folder: Path) -> list[str]:
    """The results that targets ask for and that are not there."""
    stems = dict.fromkeys(target.stem for target in TARGETS)
    return [stem for stem in stems if not any(folder.glob(f"{stem}*.json"))]


def markdown(folder: Path) -> str:
    """All targets as a Markdown table."""
    lines = ["| target | worst case measured | the best found there | met |", "| --- | --- | --- | --- |"]
    for target in TARGETS:
        results = [Results.load(path) for path in sorted(folder.glob(f"{target.stem}*.json"))]
        if found := all_found(target, results):
            first = found[0]
            cells = [f"{ratio_text(first.ratio)} ({first.place})", ratio_text(first.allowed)]
            lines.append(f"| {' | '.join([target.text, *cells, verdict(target.factor, found)])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(OUT), end="")
