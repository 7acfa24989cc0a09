"""What ranks, and those who watch them, report of a case: the oracle's evidence."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass, field

__all__ = ["Board", "Failure", "Fate", "Record"]


@dataclass(frozen=True)
class Failure:
    """An exception of a call.

    Attributes:
        kind: the class's name.
        text: the message.
        operation: what was called.
        began: when, on the monotonic clock, in seconds.
        ended: when the exception came.
    """

    kind: str
    text: str
    operation: str
    began: float
    ended: float


@dataclass
class Record:
    """What one rank saw.

    Attributes:
        wrong: results that were not what plain arithmetic says, and other broken promises.
        failure: the first exception of a call of the stream, if there was one.
        again: the exception of the next call in the same group.
        completed: sound calls of the stream.
        trouble: an exception where none may be (before or after the stream), with its traceback.
    """

    wrong: list[str] = field(default_factory=list)
    failure: Failure | None = None
    again: Failure | None = None
    completed: int = 0
    trouble: str = ""


@dataclass
class Fate:
    """What became of one rank's process.

    Attributes:
        record: what it reported; None if it reported nothing.
        exit_code: negative for a signal; None if it had to be killed at the end.
        seconds_to_end: from the report to the end of the process.
        output: of its standard error, with its stacks if it did not answer in time.
    """

    record: Record | None = None
    exit_code: int | None = None
    seconds_to_end: float = 0.0
    output: str = ""


class Board:
    """A page that all processes of a case share: who is ready, and when the fault began."""

    SLOTS = 16
    STRUCK = SLOTS  # the slot behind those of the ranks

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def _set(self, slot: int, value: float) -> None:
        struct.pack_into("d", self._page, 8 * slot, value)

    def _get(self, slot: int) -> float:
        return float(struct.unpack_from("d", self._page, 8 * slot)[0])

    def say_ready(self, rank: int) -> None:
        """This rank's groups are made."""
        self._set(rank, time.monotonic())

    def ready(self, ranks: int) -> bool:
        """Whether all ranks' groups are made."""
        return all(self._get(rank) > 0 for rank in range(ranks))

    def strike(self) -> None:
        """The fault begins now."""
        self._set(self.STRUCK, time.monotonic())

    @property
    def struck(self) -> float:
        """When the fault began; 0.0 before."""
        return self._get(self.STRUCK)
