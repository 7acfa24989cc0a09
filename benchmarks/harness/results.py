"""What a benchmark found, as a file: the machine, the layout of the ranks, a row a case and candidate."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

__all__ = ["Results", "Row", "human_bytes", "human_time", "machine", "row"]


@dataclass(frozen=True)
class Row:
    """Microseconds of one candidate in one case."""

    case: str
    bytes: int
    candidate: str
    p50: float
    p99: float
    samples: int


@dataclass
class Results:
    """All rows of one run, in the order they were measured."""

    claim: str
    layout: str
    notes: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @staticmethod
    def joined(parts: Iterable[Results], nothing: str) -> Results:
        """The rows of several jobs as those of one.

        Raises:
            SystemExit: there was no job; ``nothing`` says what to do.
        """
        whole: Results | None = None
        for part in parts:
            if whole is None:
                whole = part
            else:
                whole.rows += part.rows
        if whole is None:
            raise SystemExit(nothing)
        return whole

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Read what :meth:`save` wrote."""
        raw = json.loads(path.read_text())
        return Results(raw["claim"], raw["layout"], raw["notes"], [Row(**one) for one in raw["rows"]])

    def p50(self, case: str, nbytes: int, candidate: str) -> float | None:
        """The median in microseconds, None if the candidate was not in this case."""
        for one in self.rows:
            if (one.case, one.bytes, one.candidate) == (case, nbytes, candidate):
                return one.p50
        return None

    def cases(self) -> list[tuple[str, int]]:
        """Every (case, bytes) in the order measured."""
        return list(dict.fromkeys((one.case, one.bytes) for one in self.rows))

    def candidates(self) -> list[str]:
        """Every candidate in the order measured."""
        return list(dict.fromkeys(one.candidate for one in self.rows))


def row(case: str, nbytes: int, candidate: str, samples: Sequence[float]) -> Row:
    """Reduce the samples of one candidate, in microseconds, to a row."""
    p50, p99 = np.percentile(np.asarray(samples), [50, 99])
    return Row(case, nbytes, candidate, float(p50), float(p99), len(samples))


def machine() -> dict[str, str]:
    """The machine in neutral words."""
    import torch

    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{len(os.sched_getaffinity(0))} cores of {model}",
        "memory": f"{memory:.0f} GiB",
        "system": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "torch": torch.__version__,
    }


def human_bytes(nbytes: int) -> str:
    """4 B, 256 KiB, 64 MiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def human_time(microseconds: float) -> str:
    """3.31 µs, 178 µs, 12.4 ms."""
    if microseconds < 1000:
        return f"{microseconds:.3g} µs"
    return f"{microseconds / 1000:.3g} ms"
