"""What a campaign found, for people: every broken promise as it comes, and a table at the end."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.campaign.oracle import KINDS
from tests.faults.campaign.trial import Result

__all__ = ["Report"]


@dataclass
class Report:
    """Counts of one campaign.

    Attributes:
        results: of the cases, as they came.
        left: what the campaign as a whole has left behind.
    """

    results: list[Result] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Take in a case, and print it if a promise was broken."""
        self.results.append(result)
        if result.seen.findings or result.left:
            texts = [f"{finding.kind}: {finding.text}" for finding in result.seen.findings]
            print(f"{result.case.trial}: {result.case}", *texts, *result.left, sep="\n    ", flush=True)

    @property
    def broken(self) -> int:
        """Cases with a broken promise."""
        return sum(bool(result.seen.findings or result.left) for result in self.results)

    def counts(self) -> dict[str, int]:
        """In how many cases each kind of promise was broken."""
        kinds = Counter(kind for result in self.results for kind in {f.kind for f in result.seen.findings})
        return {**{kind: kinds[kind] for kind in KINDS}, "leftovers": sum(bool(r.left) for r in self.results)}

    def table(self) -> str:
        """Cases and broken ones by fault, with the seconds from the fault to the last rank's error."""
        lines = [f"{'fault':20}{'cases':>6}{'broken':>8}{'median s':>10}{'longest s':>11}"]
        for fault in sorted({result.case.fault for result in self.results}):
            of_fault = [result for result in self.results if result.case.fault == fault]
            broken = sum(bool(result.seen.findings or result.left) for result in of_fault)
            seconds = [result.seen.seconds for result in of_fault if result.seen.seconds is not None]
            times = f"{statistics.median(seconds):10.2f}{max(seconds):11.2f}" if seconds else ""
            lines.append(f"{fault:20}{len(of_fault):6}{broken:8}{times}")
        lines += [f"{kind}: {count} cases" for kind, count in self.counts().items()]
        return "\n".join([*lines, *(f"left behind: {name}" for name in self.left)])

    def write(self, path: Path, **options: Any) -> None:
        """Write everything as JSON."""
        cases = [
            {
                "case": asdict(result.case),
                "findings": [asdict(finding) for finding in result.seen.findings],
                "left": result.left,
                "seconds": result.seen.seconds,
                "output": result.output,
            }
            for result in sorted(self.results, key=lambda result: result.case.trial)
        ]
        path.write_text(
            json.dumps(
                {"options": options, "counts": self.counts(), "left": self.left, "cases": cases}, indent=1
            )
        )
