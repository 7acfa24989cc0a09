"""Interfaces of what turns handle: runs, arriving messages, weight gradients, state per microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from opensmd.modelparallel.runtime.messages.message import Message

__all__ = ["Arrivals", "Done", "Run", "SwappedState", "Waiting", "WeightWork"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A microbatch has only its backward left, which continues when one of ``messages`` has come."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Done:
    """A microbatch has ended."""


class Run(Protocol):
    """A microbatch's pass through the step, as seen by turns."""

    def advance(self) -> Waiting | Done:
        """Continue as long as the user's function, or what it has left, needs the thread's stack."""


class Arrivals(Protocol):
    """The part of a transport that turns need: which messages have come."""

    def ready(self, message: Message) -> bool:
        """Whether a message has come."""

    def wait_any(self, messages: Sequence[Message]) -> int:
        """Wait until one of the messages has come, and return it."""

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        """Wait at most so long for one of the messages, and return whether one has come."""


class WeightWork(Protocol):
    """The weight gradients that backwards have left for later."""

    @property
    def left(self) -> Sequence[tuple[int, int]]:
        """The pending microbatches and chunks, earliest first; the same object throughout a step."""

    def run(self, microbatch: int, chunk: int) -> None:
        """Compute the weight gradients of one microbatch."""


class SwappedState(Protocol):
    """What every microbatch has to itself although they take turns."""

    @property
    def watches_first(self) -> bool:
        """Whether the first microbatch is to complete its forward before others begin."""

    def watch_first(self) -> None:
        """Note that the first microbatch might be suspended here, if it were not alone."""

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """Start a microbatch, or its deferred backward."""

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """Suspend a microbatch for others; ``through``: whether its forward is complete."""

    def resume(self, microbatch: int) -> None:
        """Resume a microbatch after others have run."""

    def end(self, microbatch: int, *, backward_left: bool) -> None:
        """End a microbatch's function, or the backward that it has deferred."""
