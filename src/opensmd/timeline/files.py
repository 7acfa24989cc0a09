"""Reading the files of all ranks, on one clock: that of the lowest rank's host (see ``clocks``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opensmd.timeline.clocks import HostClock, differences
from opensmd.timeline.rank_file import read_rank_file
from opensmd.timeline.span import Span

__all__ = ["Timeline", "read_timeline"]


class Timeline(dict[int, list[Span]]):
    """Each rank's spans, by start, in nanoseconds since the very first one.

    Attributes:
        cut: ranks with only the beginning recorded.
    """

    cut: Sequence[int] = ()

    @property
    def end_ns(self) -> int:
        """When the last span ended."""
        return max((span.end_ns for spans in self.values() for span in spans), default=0)


def read_timeline(folder: Path) -> Timeline:
    """Read what the ranks of a job have recorded in ``folder``.

    Raises:
        ValueError: the folder has no timelines of ranks, or a file that only has the name of one.
    """
    files = [read_rank_file(path) for path in sorted(folder.glob("rank-*.events"))]
    hosts: dict[str, HostClock] = {}
    for file in files:
        hosts.setdefault(file.machine, HostClock(file.wall_ns)).ranks[file.rank] = file.spans
    apart = differences(hosts) if hosts else {}
    timeline = Timeline()
    for host, clock in hosts.items():
        timeline.update({rank: _moved(spans, apart[host]) for rank, spans in clock.ranks.items()})
    if not any(timeline.values()):
        raise ValueError(
            f"no rank has left events in {folder}. Collectives are recorded from the first process group on, "
            "microbatches where a model is split."
        )
    first = min(span.start_ns for spans in timeline.values() for span in spans)
    for rank in sorted(timeline):
        timeline[rank] = sorted(_moved(timeline.pop(rank), -first), key=lambda span: span.start_ns)
    timeline.cut = [file.rank for file in files if file.cut]
    return timeline


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [span._replace(start_ns=span.start_ns + by, end_ns=span.end_ns + by) for span in spans]
