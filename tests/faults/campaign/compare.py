"""``python -m tests.faults.campaign.compare smddp.json gloo.json``: the reports of campaigns as one table."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

__all__ = ["table"]

ROWS = {
    "hang": "no error two seconds after the timeout",
    "no error": "calls go on as if nothing were",
    "wrong numbers": "wrong numbers",
    "error without cause": "an error where there is no cause",
    "wrong rank": "an error that does not name the rank, or names another",
    "wrong operation": "an error that does not name the operation",
    "wrong class": "an exception of another class",
    "end": "a process that does not end as it should",
    "not started": "groups that could not be made",
    "leftovers": "files or processes left behind",
}
DEATHS = ("kill", "exit")


def table(reports: dict[str, Any]) -> str:
    """Markdown: what happened in how many cases, by the name of each report."""
    lines = ["| in so many cases | " + " | ".join(reports) + " |", "|---|" + "---|" * len(reports)]
    for kind, words in ROWS.items():
        lines.append(f"| {words} | " + " | ".join(str(_count(one, kind)) for one in reports.values()) + " |")
    deaths = [_deaths(one) for one in reports.values()]
    lines.append("| from a death to the last rank's error: median, longest | " + " | ".join(deaths) + " |")
    return "\n".join(lines)


def _count(report: Any, kind: str) -> int:
    return int(report["counts"][kind]) + (len(report["left"]) if kind == "leftovers" else 0)


def _deaths(report: Any) -> str:
    cases = report["cases"]
    seconds = [case["seconds"] for case in cases if case["case"]["fault"] in DEATHS and case["seconds"]]
    return f"{statistics.median(seconds):.2f} s, {max(seconds):.2f} s" if seconds else ""


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    sys.stdout.write(table({file.stem: json.loads(file.read_text()) for file in files}) + "\n")
