"""Pipeline events of all ranks on one clock: the basis of the chart, the trace and the bubble figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from opensmd.environment.wall_clock import wall_clock_offset
from opensmd.modelparallel.ranks.exchange import exchange

__all__ = ["KINDS", "RecordedStretch", "PipelineEvent", "busy_share", "gather_events"]

KINDS = ("forward", "backward", "weights", "wait", "send")


class RecordedStretch(Protocol):
    """What the engine records, with times from its process's :func:`time.perf_counter_ns`."""

    @property
    def microbatch(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


class RecordedSend(Protocol):
    """A tensor or gradient that was sent, on the same clock."""

    @property
    def microbatch(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def at_ns(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PipelineEvent:
    """One stretch of work or waiting, or a tensor leaving the rank, which takes no time.

    Attributes:
        rank: whose.
        microbatch: -1 for waiting that belongs to none.
        kind: "forward", "backward", "weights", "wait" or "send".
        start_ns, end_ns: nanoseconds of the wall clock.
        target: the rank that a send goes to; otherwise -1.
    """

    rank: int
    microbatch: int
    kind: str
    start_ns: int
    end_ns: int
    target: int = -1


def gather_events(
    record: Iterable[RecordedStretch],
    group: dist.ProcessGroup | None = None,
    *,
    sent: Iterable[RecordedSend] = (),
) -> list[PipelineEvent]:
    """Gather all ranks' records, on their hosts' wall clocks; all ranks of ``group`` must call."""
    rank = dist.get_rank(group)
    offset = wall_clock_offset()
    mine = [
        PipelineEvent(
            rank=rank,
            microbatch=event.microbatch,
            kind=event.kind,
            start_ns=event.start_ns + offset,
            end_ns=event.end_ns + offset,
        )
        for event in record
    ]
    mine += [
        PipelineEvent(
            rank=rank,
            microbatch=message.microbatch,
            kind="send",
            start_ns=message.at_ns + offset,
            end_ns=message.at_ns + offset,
            target=message.target,
        )
        for message in sent
    ]
    return [event for events in exchange(mine, group) for event in events]


def busy_share(events: Sequence[PipelineEvent]) -> dict[int, float]:
    """Return the share of the whole span for which each rank computed; the rest is its bubble."""
    if not events:
        return {}
    span = max(event.end_ns for event in events) - min(event.start_ns for event in events)
    busy: dict[int, int] = {event.rank: 0 for event in events}
    for event in events:
        if event.kind != "wait":
            busy[event.rank] += event.end_ns - event.start_ns
    return {rank: time_busy / span if span else 0.0 for rank, time_busy in sorted(busy.items())}
