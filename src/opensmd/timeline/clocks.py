"""How far the clocks of a job's hosts are apart. Pure.

Each host's own clock is exact; between hosts there are the wall clocks, which are as far apart as the hosts'
time service leaves them, and what the ranks did together: nobody leaves a collective that needs all ranks
before the last of them has entered it. So every such collective says of two hosts by how much their clocks
differ at least and at most, and the wall clocks count as far as they stay within that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opensmd.timeline.span import COLLECTIVES, Span

__all__ = ["HostClock", "differences"]

# Collectives whose every result needs every rank.
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
    """One host's clock, and what its ranks did by it.

    Attributes:
        wall_ns: what the wall clock shows when this one shows zero.
        ranks: the spans of each rank.
    """

    wall_ns: int
    ranks: dict[int, Sequence[Span]] = field(default_factory=dict)


@dataclass
class _Passage:
    """When the last rank of a host entered a collective, and when the first one left it."""

    last_start: int
    first_end: int


def differences(hosts: Mapping[str, HostClock]) -> dict[str, int]:
    """For each host, what is to be added to its clock to get that of the host of the lowest rank."""
    first = min(hosts, key=lambda name: min(hosts[name].ranks, default=0))
    passages = {name: _passages(clock.ranks.values()) for name, clock in hosts.items()}
    return {
        name: _within(clock.wall_ns - hosts[first].wall_ns, passages[first], passages[name])
        for name, clock in hosts.items()
    }


def _passages(ranks: Iterable[Sequence[Span]]) -> dict[str, _Passage]:
    found: dict[str, _Passage] = {}
    for spans in ranks:
        for span in spans:
            if span.track != COLLECTIVES or span.name not in TOGETHER or not span.call:
                continue
            if span.end_ns == span.start_ns:  # nobody knows when it ended
                continue
            if span.call.rpartition("/")[0].endswith("/cuda"):  # begins when it is queued, and ends by that
                continue
            one = found.setdefault(span.call, _Passage(span.start_ns, span.end_ns))
            one.last_start = max(one.last_start, span.start_ns)
            one.first_end = min(one.first_end, span.end_ns)
    return found


def _within(wall: int, ours: Mapping[str, _Passage], theirs: Mapping[str, _Passage]) -> int:
    """The difference of the wall clocks, moved as far as it contradicts what both hosts did together."""
    both = [(ours[call], theirs[call]) for call in ours.keys() & theirs.keys()]
    if not both:
        return wall
    least = max(here.last_start - there.first_end for here, there in both)
    most = min(here.first_end - there.last_start for here, there in both)
    if least > most:  # the clocks do not run alike, so that no one difference is right
        return wall
    return min(max(wall, least), most)
