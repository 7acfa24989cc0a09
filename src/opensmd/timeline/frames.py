"""The format of a rank's file: frequent events are written in bulk, as they are in memory.

A rank writes during training, so it only copies; ``rank_file`` creates spans afterwards. A frame is a line of
tab-separated words, the last of which is the number of bytes of data that follow:

    begin       rank, machine, what the wall clock shows when the rank's clock shows zero
    group       number, name, global ranks
    operation   number, name
    calls       data: collectives and messages, as the core holds them (csrc/core/timeline/event_ring.hpp)
    expected    number; data: the parts of a step that a plan expects
    step        number of what is expected of it; data: its stretches, column by column
    lost        how many calls found no room, and when the first of them began
    cut         all that follows was left out
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

__all__ = [
    "BEGINNING",
    "CALL",
    "CUT",
    "KINDS",
    "NOTHING_EXPECTED",
    "PART",
    "Part",
    "Stretch",
    "begin_frame",
    "calls_frame",
    "expected_frame",
    "frames",
    "group_frame",
    "lost_frame",
    "operation_frame",
    "step_frame",
    "stretches_of",
]

Stretch = tuple[int, str, int, int]  # microbatch, one of KINDS, start and end in nanoseconds
Part = tuple[int, str, float, float]  # the same in a plan, in seconds since the start of the step

KINDS = ("forward", "backward", "weights", "wait")
CALL = Struct("<QQQQIiII")  # start, end, bytes, sequence, group, peer, operation, unused
PART = Struct("<qqdd")
BEGINNING = b"begin\t"  # at the start of every rank's file
NOTHING_EXPECTED = -1  # the number of a step without an expectation

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def _frame(*words: object, data: bytes = b"") -> bytes:
    return b"%b\t%d\n%b" % ("\t".join(map(str, words)).encode(), len(data), data)


CUT = _frame("cut")


def begin_frame(rank: int, machine: str, wall_ns: int) -> bytes:
    """Return a file's first frame: which rank wrote it, where, and from when on."""
    return _frame("begin", rank, machine, wall_ns)


def group_frame(number: int, name: str, ranks: Sequence[int]) -> bytes:
    """Return the frame of a group that calls belong to."""
    return _frame("group", number, name, ",".join(map(str, ranks)))


def operation_frame(number: int, name: str) -> bytes:
    """Return the frame that says what calls of a number do."""
    return _frame("operation", number, name)


def calls_frame(calls: bytes) -> bytes:
    """Return a frame of calls, each packed by CALL."""
    return _frame("calls", data=calls)


def lost_frame(count: int, first_ns: int) -> bytes:
    """Return a frame about calls that could not be recorded."""
    return _frame("lost", count, first_ns)


def expected_frame(number: int, parts: Iterable[Part]) -> bytes:
    """Return the frame of what a plan expects of this rank in a step."""
    data = [PART.pack(index, _NUMBER[kind], begin, end) for index, kind, begin, end in parts]
    return _frame("expected", number, data=b"".join(data))


def step_frame(expected: int, stretches: Sequence[Stretch]) -> bytes:
    """Return the frame of what this rank did in a step; ``expected``: the plan's number."""
    microbatches, kinds, starts, ends = zip(*stretches, strict=True) if stretches else ((), (), (), ())
    columns = (microbatches, map(_NUMBER.__getitem__, kinds), starts, ends)
    return _frame("step", expected, data=b"".join(array("q", column).tobytes() for column in columns))


def stretches_of(data: bytes) -> Iterator[Stretch]:
    """What a step's frame holds."""
    numbers = array("q", data)
    rows = len(numbers) // 4
    for microbatch, kind, start, end in zip(
        *(numbers[i * rows : (i + 1) * rows] for i in range(4)), strict=True
    ):
        yield microbatch, KINDS[kind], start, end


def frames(content: bytes) -> Iterator[tuple[list[str], bytes]]:
    """The words and the data of each frame; not of half a one, which a killed rank may have left at the end.

    Raises:
        ValueError: what is read is no timeline.
    """
    at = 0
    while (line := content.find(b"\n", at)) >= 0:
        *words, size = content[at:line].decode().split("\t")
        at = line + 1 + int(size)
        if at > len(content):
            return
        yield words, content[line + 1 : at]
