"""``smd doctor``: a list of checks, and exit status 1 if something is missing.

Every finding is one line, however long, so that paths and commands can be copied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import click

from opensmd.tools.checks import CHECKS, Finding

__all__ = ["doctor"]

_MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("mend", "red")}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of findings for programs.")
def doctor(as_json: bool) -> None:
    """Check what this machine has, and say how to add what is missing. Builds the native core if needed."""
    findings = [check() for check in CHECKS]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for line in as_lines(findings):
            click.echo(line)
    if any(finding.state == "bad" for finding in findings):
        raise SystemExit(1)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, and one below it for what to do."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        mark, colour = _MARKS[finding.state]
        lines.append(f"{click.style(f'{mark:4}', fg=colour)}  {finding.what:{width}}  {finding.text}")
        # several lines, such as a compiler's output, go below each other
        lines += [f"{'':4}  {'':{width}}  to do: {finding.mend.splitlines()[0]}"] if finding.mend else []
        lines += [f"{'':4}  {'':{width}}         {line}" for line in finding.mend.splitlines()[1:]]
    return lines
