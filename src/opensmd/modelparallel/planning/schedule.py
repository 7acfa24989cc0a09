"""Which microbatch a rank works on next. Pure: states and arrivals in, a number out.

Two policies, both for both values of ``pipeline``: "interleaved" lets backwards go first, as soon as they
can, and keeps a bounded number of microbatches under way; "simple" does all forwards, then all backwards.
With backwards that take twice as long as forwards::

    interleaved, 2 ranks                             simple, 2 ranks
    F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3     F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3           .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

    interleaved, 3 ranks, weight gradients (W) of the last microbatches apart
    F0 F1 F2 F3 .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 B3 B3 B4 B4 .  B5 B5
    .  F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 B3 B3 B4 F5 W4 .  B5 W5
    .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 F4 B4 W3 W4 F5 B5 W5

*Ready first* takes whatever can go on. A rank starts a new microbatch only when nothing else can be done, and
only within its window. It needs a transport that can say what has come.

*Fixed order* gives every rank the same order of forwards and backwards, whatever has come: for transports
whose messages must be received in the order in which they were sent, and for ``deterministic_server``.

Results do not depend on the policy.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

__all__ = [
    "FixedOrder",
    "Pipeline",
    "Policy",
    "Progress",
    "ReadyFirst",
    "in_flight",
    "most_active",
    "split_backwards",
    "window",
]

Pipeline = Literal["interleaved", "simple"]


class Progress(enum.Enum):
    """How far a microbatch has come on this rank."""

    NEW = "new"
    RUNNING = "running"
    FORWARD = "waits in forward"
    AT_BACKWARD = "waits before backward"
    BACKWARD = "waits in backward"
    DONE = "done"


_NEW, _RUNNING, _FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress  # Enum members are slow to reach


class Policy(Protocol):
    """Chooses the microbatch that goes on."""

    waits_in_place: bool

    def pick(self, progress: Sequence[Progress], can_go_on: Callable[[int], bool]) -> int | None:
        """The next microbatch; None to wait for a message.

        Args:
            progress: of every microbatch; none is RUNNING, and they begin in their order.
            can_go_on: whether what a microbatch waits for has come; asked for suspended ones only.
        """

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """Whether a microbatch must wait before its backward for others, whatever has come."""


def most_active(partitions: int, wanted: int | None) -> int:
    """How many microbatches may be under way at once: the setting ``active_microbatches``, or its default."""
    return partitions + 2 if wanted is None else wanted


def window(*, partitions: int, stage: int, chain: bool, active_microbatches: int) -> int:
    """How many microbatches may be under way on a stage at once.

    In a chain the stage needs as many as there are stages from it to the end, and one more, so that the next
    stage finds its input when it has finished a backward; the last stage needs one. Placements that come back
    to a stage need one for each stage everywhere. ``active_microbatches`` bounds all.
    """
    last = stage == partitions - 1
    needed = partitions if not chain else 1 if last else partitions - stage + 1
    return max(1, min(needed, active_microbatches))


def in_flight(*, partitions: int, microbatches: int, active_microbatches: int, chain: bool) -> list[int]:
    """How many microbatches' activations each stage holds at most under the interleaved schedule."""
    return [
        min(
            microbatches,
            window(partitions=partitions, stage=stage, chain=chain, active_microbatches=active_microbatches),
        )
        for stage in range(partitions)
    ]


def split_backwards(*, stage: int, chain: bool, most: int, microbatches: int) -> int:
    """How many of a step's last microbatches compute gradients of weights when the rank is free for it.

    While the last gradients travel to the first stage and through it, a stage has room for one such
    microbatch for each stage before it, and for one of its own; ``most`` bounds them, as what waits keeps
    activations. A first stage that nothing comes back to sends no gradients, and a single microbatch may look
    at its gradients as soon as it has had its backward.
    """
    if microbatches == 1 or (chain and stage == 0):
        return 0
    return min(stage + 1, most, microbatches)


class ReadyFirst:
    """Take what has arrived: backwards under way, backwards to begin, forwards under way, new ones.

    Args:
        pipeline: "interleaved" or "simple".
        window: how many microbatches may be under way at once; without meaning for "simple".
        last_goes_last: the last microbatch goes backward after all others: replicas reduce gradients in it.
    """

    waits_in_place = False

    def __init__(self, pipeline: Pipeline, window: int, *, last_goes_last: bool = False) -> None:
        self.simple = pipeline == "simple"
        self.window = window
        self._last_goes_last = last_goes_last
        self._done = 0  # that many microbatches from the first

    def pick(self, progress: Sequence[Progress], can_go_on: Callable[[int], bool]) -> int | None:
        """See :class:`Policy`."""
        fresh: int | None = None
        backward, at_backward, forward = [], [], []
        count, first = len(progress), self._done
        while first < count and progress[first] is _DONE:
            first += 1
        self._done = first
        for microbatch in range(first, count):
            state = progress[microbatch]
            if state is _NEW:
                fresh = microbatch  # and all after it
                break
            if state is _AT_BACKWARD:
                at_backward.append(microbatch)
            elif state is _FORWARD:
                forward.append(microbatch)
            elif state is _BACKWARD:
                backward.append(microbatch)
        only_forwards = self.simple and (forward or fresh is not None)
        for microbatch in forward if only_forwards else [*backward, *at_backward, *forward]:
            if can_go_on(microbatch):
                return microbatch
        under_way = len(backward) + len(at_backward) + len(forward)
        return fresh if self.simple or under_way < self.window else None

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """See :class:`Policy`."""
        if not self._last_goes_last or microbatch != len(progress) - 1:
            return False
        return any(state is not _DONE for state in progress[:-1])


class FixedOrder:
    """The same forwards and backwards in the same order on every rank; receives wait where they are.

    Args:
        pipeline: "interleaved" or "simple".
        window: how many forwards go ahead of the first backward; the same number on every rank.
        microbatches: of the step.
    """

    waits_in_place = True

    def __init__(self, pipeline: Pipeline, window: int, microbatches: int) -> None:
        ahead = microbatches if pipeline == "simple" else min(window, microbatches)
        self._forwards = deque(range(microbatches))
        self._ahead = ahead

    def pick(self, progress: Sequence[Progress], can_go_on: Callable[[int], bool]) -> int | None:
        """See :class:`Policy`; never None, because a microbatch that waits does so in place."""
        waiting = [i for i, state in enumerate(progress) if state is _AT_BACKWARD]
        if self._forwards and (len(waiting) < self._ahead):
            return self._forwards.popleft()
        return waiting[0] if waiting else None

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """See :class:`Policy`; never, because the last microbatch's turn comes last in any case."""
        return False
