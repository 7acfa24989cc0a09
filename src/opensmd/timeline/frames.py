"""What a rank's file consists of, as it is written: what happens often in bulk, as it lies in memory.

A rank writes while it trains, so it only copies; ``rank_file`` makes spans of it afterwards. A frame is a
line of words between tabs, the last of which says how many bytes of data follow it:

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
Part = tuple[int, str, float, float]  # the same by a plan, in seconds since the step began

KINDS = ("forward", "backward", "weights", "wait")
CALL = Struct("<QQQQIiII")  # start, end, bytes, sequence, group, peer, operation, unused
PART = Struct("<qqdd")
BEGINNING = b"begin\t"  # of every rank's file
NOTHING_EXPECTED = -1  # a step's number of what is expected

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def _frame(*words: object, data: bytes = b"") -> bytes:
    return b"%b\t%d\n%b" % ("\t".join(map(str, words)).encode(), len(data), data)


CUT = _frame("cut")


def begin_frame(rank: int, machine: str, wall_ns: int) -> bytes:
    """The first frame of a file: which rank wrote it, where and from when on."""
    return _frame("begin", rank, machine, wall_ns)


def group_frame(number: int, name: str, ranks: Sequence[int]) -> bytes:
    """A group that calls belong to."""
    return _frame("group", number, name, ",".join(map(str, ranks)))


def operation_frame(number: int, name: str) -> bytes:
    """What calls of a number do."""
    return _frame("operation", number, name)


def calls_frame(calls: bytes) -> bytes:
    """Calls, each as CALL packs it."""
    return _frame("calls", data=calls)


def lost_frame(count: int, first_ns: int) -> bytes:
    """Calls that nobody could note."""
    return _frame("lost", count, first_ns)


def expected_frame(number: int, parts: Iterable[Part]) -> bytes:
    """What a plan expects of this rank in a step."""
    data = [PART.pack(index, _NUMBER[kind], begin, end) for index, kind, begin, end in parts]
    return _frame("expected", number, data=b"".join(data))


def step_frame(expected: int, stretches: Sequence[Stretch]) -> bytes:
    """What this rank did in a step; ``expected``: by which plan."""
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
        ValueError: it is something else.
    """
    at = 0
    while (line := content.find(b"\n", at)) >= 0:
        *words, size = content[at:line].decode().split("\t")
        at = line + 1 + int(size)
        if at > len(content):
            return
        yield words, content[line + 1 : at]
