"""``smd doctor``: the checks as a table, and an exit status of 1 if something is missing."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from opensmd.tools.checks import CHECKS, Finding

__all__ = ["doctor"]

_MARKS = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]mend[/]"}


@click.command()
def doctor() -> None:
    """Say what this machine has and how to mend what it lacks. Builds the native core if it is not built."""
    findings = [check() for check in CHECKS]
    Console(soft_wrap=False).print(as_table(findings))
    missing = sum(finding.state == "bad" for finding in findings)
    if missing:
        raise SystemExit(1)


def as_table(findings: list[Finding]) -> Table:
    """The findings, what to do in the last column."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.state], finding.what, finding.text, finding.mend)
    return table
