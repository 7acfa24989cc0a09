"""The differences between the clocks of a job's hosts; pure.

Each host's own clock is exact. Between hosts there are the wall clocks, which differ by as much as the time
service leaves, and the collectives: no rank leaves one that needs all ranks before the last of them has
entered. So every such collective gives a lower and an upper bound on the difference of two hosts' clocks, and
the wall clocks count as far as they stay within these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opensmd.timeline.span import COLLECTIVES, Span

__all__ = ["HostClock", "differences"]

# Collectives in which every result needs every rank.
TOGETHER = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "barrier",
)


@dataclass
class HostClock:
    """One host's clock, and its ranks' spans on it.

    Attributes:
        wall_ns: the wall clock's time when this clock was zero.
        ranks: the spans of each rank.
    """

    wall_ns: int
    ranks: dict[int, Sequence[Span]] = field(default_factory=dict)


@dataclass
class _Passage:
    """When a host's last rank entered a collective, and when its first one left."""

    last_start: int
    first_end: int


def differences(hosts: Mapping[str, HostClock]) -> dict[str, int]:
    """Return, for each host, what to add to its clock to get that of the lowest rank's host."""
    first = min(hosts, key=lambda name: min(hosts[name].ranks, default=0))
    passages = {name: _passages(clock.ranks.values()) for name, clock in hosts.items()}
    return {
        name: _within(clock.wall_ns - hosts[first].wall_ns, passages[first], passages[name])
        for name, clock in hosts.items()
    }


def _passages(ranks: Iterable[Sequence[Span]]) -> dict[str, _Passage]:
    passages: dict[str, _Passage] = {}
    for spans in ranks:
        for span in spans:
            if span.track != COLLECTIVES or span.name not in TOGETHER or not span.call:
                continue
            if span.end_ns == span.start_ns:  # its end is unknown
                continue
            if span.call.rpartition("/")[0].endswith("/cuda"):  # starts when it is queued, and ends with that
                continue
            one = passages.setdefault(span.call, _Passage(span.start_ns, span.end_ns))
            one.last_start = max(one.last_start, span.start_ns)
            one.first_end = min(one.first_end, span.end_ns)
    return passages


def _within(wall: int, ours: Mapping[str, _Passage], theirs: Mapping[str, _Passage]) -> int:
    """Return the wall clocks' difference, corrected as far as it contradicts what both hosts did together."""
    both = [(ours[call], theirs[call]) for call in ours.keys() & theirs.keys()]
    if not both:
        return wall
    least = max(here.last_start - there.first_end for here, there in both)
    most = min(here.first_end - there.last_start for here, there in both)
    if least > most:  # the clocks drift, so no single difference is right
        return wall
    return min(max(wall, least), most)
