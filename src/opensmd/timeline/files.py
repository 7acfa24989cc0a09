"""Reads the files of all ranks, on one clock: that of the host of the lowest rank (see ``clocks``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opensmd.timeline.clocks import HostClock, differences
from opensmd.timeline.recorder import MOST
from opensmd.timeline.span import Span

__all__ = ["Timeline", "read_timeline"]


class Timeline(dict[int, list[Span]]):
    """Each rank's spans, by start, in nanoseconds since the first of them all."""

    @property
    def end_ns(self) -> int:
        """When the last span ended."""
        return max((span.end_ns for spans in self.values() for span in spans), default=0)

    @property
    def cut(self) -> list[int]:
        """Ranks of which only the beginning was recorded."""
        return [rank for rank, spans in self.items() if len(spans) >= MOST]


def read_timeline(folder: Path) -> Timeline:
    """What the ranks of a job have left in ``folder``.

    Raises:
        ValueError: there is nothing, or something else.
    """
    hosts: dict[str, HostClock] = {}
    for path in sorted(folder.glob("rank-*.tsv")):
        rank, (host, wall), spans = _read(path)
        hosts.setdefault(host, HostClock(wall)).ranks[rank] = spans
    apart = differences(hosts) if hosts else {}
    found = Timeline()
    for host, clock in hosts.items():
        found.update({rank: _moved(spans, apart[host]) for rank, spans in clock.ranks.items()})
    if not any(found.values()):
        raise ValueError(
            f"no rank has left events in {folder}. Collectives are recorded from the first process group on, "
            "microbatches where a model is split."
        )
    first = min(span.start_ns for spans in found.values() for span in spans)
    for rank in sorted(found):
        found[rank] = sorted(_moved(found.pop(rank), -first), key=lambda span: span.start_ns)
    return found


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [span._replace(start_ns=span.start_ns + by, end_ns=span.end_ns + by) for span in spans]


def _read(path: Path) -> tuple[int, tuple[str, int], list[Span]]:
    """A rank, its host with that one's offset to the wall clock, and its spans."""
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    try:
        rank, host, offset = head.split("\t")
        whole = rest[: rest.rfind("\n") + 1]  # a killed rank may have left half a line
        return int(rank), (host, int(offset)), [_span(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is not a rank's part of a timeline: {error}") from error


def _span(line: str) -> Span:
    track, name, start, end, microbatch, call, size = line.split("\t")
    return Span(track, name, int(start), int(end), int(microbatch), call, int(size))
