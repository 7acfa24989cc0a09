"""Results as plots: time over message size, both logarithmic, one line a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.results import Results, human_bytes

__all__ = ["bars", "lines"]


def lines(results: Results, path: Path, *, case: str, leave_out: Sequence[str] = ()) -> None:
    """Medians in microseconds of one case over the message size, as a PNG."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in results.candidates():
        points = [(r.bytes, r.p50) for r in results.rows if (r.case, r.candidate) == (case, name)]
        if points and name not in leave_out:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({nbytes for other_case, nbytes in results.cases() if other_case == case})
    axes.set_xticks(sizes, [human_bytes(size) for size in sizes], rotation=45)
    axes.set_ylabel("median, µs")
    axes.set_title(f"{case}, {results.layout}")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def bars(results: Results, path: Path, *, title: str, leave_out: Sequence[str] = ()) -> None:
    """Medians of every case, one group of bars a case, relative to the slowest candidate of the case."""
    plt = _pyplot()
    names = [name for name in results.candidates() if name not in leave_out]
    cases = results.cases()
    figure, axes = plt.subplots(figsize=(max(8, 0.6 * len(cases) * len(names) / 2), 5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = []
        for case, nbytes in cases:
            slowest = max(t for n in names if (t := results.p50(case, nbytes, n)) is not None)
            heights.append((results.p50(case, nbytes, name) or 0.0) / slowest)
        axes.bar([at + i * width for at in range(len(cases))], heights, width, label=name)
    labels = [f"{case}\n{human_bytes(nbytes)}" if nbytes else case for case, nbytes in cases]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(cases))], labels, fontsize=8)
    axes.set_ylabel("time relative to the slowest (lower is better)")
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def _pyplot():  # type: ignore[no-untyped-def]  # matplotlib ships no types
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure, path: Path) -> None:  # type: ignore[no-untyped-def]  # matplotlib ships no types
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
