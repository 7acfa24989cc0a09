"""``python -m benchmarks.hosts.prediction``: what ``smd plan comm`` predicts beside what is measured.

What the cores do is measured over cables without a limit, at one size; all else is predicted from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.harness.options import command_parser
from benchmarks.harness.results import Results, Row, human_bytes, human_time, row
from benchmarks.harness.table import Grid
from benchmarks.hosts.__main__ import measure
from benchmarks.hosts.ways import EXACT, TREE
from opensmd.collectives.hosts.cost_model import MIB, Cluster, predict

# Of the model, and what is measured.
CANDIDATES = {
    "ring": "gloo",
    "tree": f"smddp: {TREE}",
    "levels": "smddp",
    "levels, bf16": "smddp: bf16",
    "levels, int8": "smddp: int8",
}
WAYS = [name.removeprefix("smddp: ") for name in CANDIDATES.values() if ":" in name]
FITTED = 16 * MIB
SIZES = [8 * MIB, 32 * MIB]  # a cable lets the first MiB of smaller ones pass at once
PAYLOAD = 0.955  # of what the cables carry: they count the headers of 1,500-byte frames, 66 each


def main() -> None:
    """Measure the cores, predict, measure, compare."""
    parser = command_parser(__doc__, seconds=1.0)
    parser.set_defaults(backends=["smddp", "gloo"], rounds=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 2], help="ranks on each, all alike")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--megabits", type=float, nargs="+", default=[1000.0, 10000.0])
    options = parser.parse_args()
    options.operations, options.dtype, options.delay = [EXACT.name], "float32", 0.0
    cores = fitted(unlimited(options), Cluster(len(options.hosts), options.hosts[0], link=1e12, delay=0.0))
    results: Results | None = None
    for megabits in options.megabits:
        found = measure(options, megabits, WAYS)
        results = results or Results("prediction", found.layout, {**found.notes, "cores": text_of(cores)})
        cluster = replace(cores, link=megabits * 1e6 / 8 * PAYLOAD)
        results.rows += compared(found, cluster, f"{megabits:g} Mbit/s")
    assert results is not None
    grid(results).print()
    layout = "-".join(map(str, options.hosts))
    results.save(options.out / f"prediction-{layout}.json")


def unlimited(options: argparse.Namespace) -> Results:
    """What the cores alone allow."""
    return measure(argparse.Namespace(**{**vars(options), "sizes": [FITTED]}), None, WAYS)


def fitted(measured: Results, cluster: Cluster) -> Cluster:
    """The cluster whose cores take as long as these did."""
    for speed, algorithm in (("sockets", "ring"), ("memory", "levels"), ("coding", "levels, int8")):
        wanted = seconds(measured, FITTED, CANDIDATES[algorithm])
        cluster = replace(cluster, **{speed: least(partial(enough, cluster, speed, algorithm, wanted))})
    return cluster


def enough(cluster: Cluster, speed: str, algorithm: str, wanted: float, value: float) -> bool:
    """Whether cores with this speed would be as fast."""
    return predict(algorithm, replace(cluster, **{speed: value}), FITTED).seconds <= wanted


def least(suffices: Callable[[float], bool]) -> float:
    """The smallest speed that suffices, between 1 MB and 1 TB a second."""
    low, high = 1e6, 1e12
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def seconds(results: Results, nbytes: int, candidate: str) -> float:
    """The median of an all_reduce."""
    found = results.p50(EXACT.name, nbytes, candidate)
    assert found is not None
    return found * 1e-6


def compared(measured: Results, cluster: Cluster, case: str) -> list[Row]:
    """Two rows for each size and way."""
    rows = []
    for _, nbytes in measured.cases():
        for algorithm, candidate in CANDIDATES.items():
            real = seconds(measured, nbytes, candidate) * 1e6
            rows.append(row(case, nbytes, f"{algorithm}: measured", [real]))
            guess = predict(algorithm, cluster, nbytes).seconds * 1e6
            rows.append(row(case, nbytes, f"{algorithm}: predicted", [guess]))
    return rows


def grid(results: Results) -> Grid:
    """A line a link and size: measured, predicted, and by how much that is off."""
    lines = []
    for case, nbytes in results.cases():
        cells = [case, human_bytes(nbytes)]
        for algorithm in CANDIDATES:
            real = results.p50(case, nbytes, f"{algorithm}: measured") or 0.0
            guess = results.p50(case, nbytes, f"{algorithm}: predicted") or 0.0
            cells.append(f"{human_time(real)} ({guess / real - 1:+.0%})")
        lines.append(cells)
    headings = ["link", "all_reduce of", *CANDIDATES]
    return Grid(f"{results.claim}, {results.layout}", headings, lines, left=2)


def text_of(cores: Cluster) -> str:
    """What was found of them."""
    speeds = ("memory", "sockets", "coding")
    return ", ".join(f"{name} {getattr(cores, name) / 1e9:.2g} GB/s" for name in speeds)


if __name__ == "__main__":
    main()
