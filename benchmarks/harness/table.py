"""Results as tables: on the terminal with rich, in the docs as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import Results, human_bytes, human_time

__all__ = ["Ratio", "markdown", "print_table"]

Ratio = tuple[str, str, Sequence[str]]
"""(title, candidate, rivals): how many times faster the candidate is than the best of the rivals present."""


def print_table(results: Results, ratios: Sequence[Ratio] = ()) -> None:
    """Print p50 (p99) of every candidate, and the ratios."""
    table = Table(title=f"{results.claim}, {results.layout}: p50 (p99)")
    header, body = _cells(results, ratios, with_p99=True)
    for name in header:
        table.add_column(name, justify="right")
    for line in body:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    for key, value in results.notes.items():
        print(f"{key}: {value}")


def markdown(results: Results, ratios: Sequence[Ratio] = ()) -> str:
    """The same as a Markdown table of medians."""
    header, body = _cells(results, ratios, with_p99=False)
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(line) + " |" for line in body]) + "\n"


def _cells(results: Results, ratios: Sequence[Ratio], *, with_p99: bool) -> tuple[list[str], list[list[str]]]:
    names = results.candidates()
    several = len({case for case, _ in results.cases()}) > 1
    header = (["operation"] if several else []) + ["size", *names, *(title for title, _, _ in ratios)]
    rows = {(each.case, each.bytes, each.candidate): each for each in results.rows}
    body = []
    for case, nbytes in results.cases():
        line = ([case] if several else []) + [human_bytes(nbytes)]
        for name in names:
            found = rows.get((case, nbytes, name))
            if found is None:
                line.append("")
            else:
                line.append(human_time(found.p50) + (f" ({human_time(found.p99)})" if with_p99 else ""))
        line += [_ratio(results, case, nbytes, mine, rivals) for _, mine, rivals in ratios]
        body.append(line)
    return header, body


def _ratio(results: Results, case: str, nbytes: int, mine: str, rivals: Sequence[str]) -> str:
    own = results.p50(case, nbytes, mine)
    others = [t for name in rivals if (t := results.p50(case, nbytes, name)) is not None]
    if own is None or not others:
        return ""
    return f"{min(others) / own:.3g}x"
