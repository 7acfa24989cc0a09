"""What turns are made of: runs that go on, messages that come, weight gradients, state per microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from opensmd.modelparallel.runtime.messages.message import Message

__all__ = ["Arrivals", "Done", "Run", "SwappedState", "Waiting", "WeightWork"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A microbatch has only its backward left, which goes on when one of ``messages`` has come."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Done:
    """A microbatch has ended."""


class Run(Protocol):
    """A microbatch's pass through the step, as its turns see it."""

    def advance(self) -> Waiting | Done:
        """Go on as far as the user's function, or what it has left, keeps the thread's stack."""


class Arrivals(Protocol):
    """What can say which messages have come: the part of a transport that turns need."""

    def ready(self, message: Message) -> bool:
        """Whether a message has come."""

    def wait_any(self, messages: Sequence[Message]) -> int:
        """Wait until one of the messages has come, and say which."""

    def comes_within(self, messages: Sequence[Message], seconds: float) -> bool:
        """Wait at most so long until one of the messages has come, and say whether it has."""


class WeightWork(Protocol):
    """The weight gradients that backwards have left for later."""

    @property
    def left(self) -> Sequence[tuple[int, int]]:
        """Of which microbatches and chunks, earliest first; the same object throughout a step."""

    def run(self, microbatch: int, chunk: int) -> None:
        """Compute the weight gradients of one microbatch."""


class SwappedState(Protocol):
    """What every microbatch has to itself although they take turns."""

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """A microbatch begins, or a backward that it has deferred."""

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """A microbatch lets others go on; ``through`` its forward or not."""

    def resume(self, microbatch: int) -> None:
        """A microbatch goes on after others have."""

    def end(self, microbatch: int, *, backward_left: bool) -> None:
        """A microbatch's function has returned, or also the backward that it has deferred."""
