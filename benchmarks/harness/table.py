"""Results as tables: on the terminal with rich, in the docs as Markdown."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import Results, human_bytes, human_time

__all__ = ["Grid", "Ratio", "markdown", "print_table", "ratio", "ratio_text"]


@dataclass(frozen=True)
class Ratio:
    """How many times faster a candidate is than the best of its rivals, counting only the time ``above``
    another candidate's if that is given."""

    title: str
    mine: str
    rivals: Sequence[str]
    above: str = ""


@dataclass(frozen=True)
class Grid:
    """A table whose cells are text already; the first ``left`` columns are words, the others numbers."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: int = 1

    def print(self) -> None:
        """For the terminal."""
        table = Table(title=self.title)
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if number < self.left else "right")
        for line in self.lines:
            table.add_row(*line)
        Console(width=None if sys.stdout.isatty() else 220).print(table)

    def markdown(self) -> str:
        """For the docs."""
        rows = [self.headings, ["---"] * len(self.headings), *self.lines]
        return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def print_table(results: Results, ratios: Sequence[Ratio] = ()) -> None:
    """Print p50 (p99) of every candidate, and the ratios."""
    header, body = _cells(results, ratios, with_p99=True)
    Grid(f"{results.claim}, {results.layout}: p50 (p99)", header, body, left=0).print()
    for key, value in results.notes.items():
        print(f"{key}: {value}")


def markdown(results: Results, ratios: Sequence[Ratio] = ()) -> str:
    """The same as a Markdown table of medians."""
    header, body = _cells(results, ratios, with_p99=False)
    return Grid("", header, body).markdown()


def _cells(results: Results, ratios: Sequence[Ratio], *, with_p99: bool) -> tuple[list[str], list[list[str]]]:
    names = results.candidates()
    several = len({case for case, _ in results.cases()}) > 1
    ratios = [
        one for one in ratios if any(ratio(results, *case, one) is not None for case in results.cases())
    ]
    header = (["operation"] if several else []) + ["size", *names, *(one.title for one in ratios)]
    rows = {(row.case, row.bytes, row.candidate): row for row in results.rows}
    body = []
    for case, nbytes in results.cases():
        line = ([case] if several else []) + [human_bytes(nbytes)]
        for name in names:
            found = rows.get((case, nbytes, name))
            if found is None:
                line.append("")
            else:
                line.append(human_time(found.p50) + (f" ({human_time(found.p99)})" if with_p99 else ""))
        line += [ratio_text(ratio(results, case, nbytes, one)) for one in ratios]
        body.append(line)
    return header, body


def ratio(results: Results, case: str, nbytes: int, wanted: Ratio) -> float | None:
    """The ratio in one case.

    It is infinite where only the rivals take more than the base, None where nobody does or one is missing.
    """
    mine = results.p50(case, nbytes, wanted.mine)
    others = [t for name in wanted.rivals if (t := results.p50(case, nbytes, name)) is not None]
    base = results.p50(case, nbytes, wanted.above) if wanted.above else 0.0
    if mine is None or not others or base is None or min(others) <= base >= mine:
        return None
    return math.inf if mine <= base else (min(others) - base) / (mine - base)


def ratio_text(value: float | None) -> str:
    """As the tables show it."""
    return "" if value is None else "∞" if math.isinf(value) else f"{value:.3g}x"
