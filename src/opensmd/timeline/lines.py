"""The lines of a rank's file, as they are written: what happens often in bulk, as it lies in memory.

A rank writes while it trains, so it only copies; ``rank_file`` makes spans of it afterwards. Each line begins
with its kind:

    the first       rank, machine, what the wall clock shows when the rank's clock shows zero
    group           number, name, global ranks
    operation       number, name
    calls           collectives and messages, as the core holds them (csrc/core/timeline/event_ring.hpp)
    expected        number, and the parts of a step that a plan expects
    step            number of what is expected of it, and its stretches
    lost            how many calls came when there was no room, and when the first began
    cut             all that follows was left out
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from struct import Struct

__all__ = [
    "CALL",
    "CUT",
    "KINDS",
    "NOTHING_EXPECTED",
    "PART",
    "STRETCH",
    "Part",
    "Stretch",
    "calls_line",
    "expected_line",
    "first_line",
    "group_line",
    "lost_line",
    "operation_line",
    "step_line",
]

Stretch = tuple[int, str, int, int]  # microbatch, one of KINDS, start and end in nanoseconds
Part = tuple[int, str, float, float]  # the same by a plan, in seconds since the step began

KINDS = ("forward", "backward", "weights", "wait")
CALL = Struct("<QQQQIiII")  # start, end, bytes, sequence, group, peer, operation, unused
STRETCH = Struct("<qqqq")
PART = Struct("<qqdd")
NOTHING_EXPECTED = -1  # a step's number of what is expected
CUT = "cut"

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def first_line(rank: int, machine: str, wall_ns: int) -> str:
    """Whose file it is."""
    return f"{rank}\t{machine}\t{wall_ns}"


def group_line(number: int, name: str, ranks: Sequence[int]) -> str:
    """A group that calls belong to."""
    return f"group\t{number}\t{name}\t{','.join(map(str, ranks))}"


def operation_line(number: int, name: str) -> str:
    """What calls of a number do."""
    return f"operation\t{number}\t{name}"


def calls_line(calls: bytes) -> str:
    """Calls, each as CALL packs it."""
    return f"calls\t{b64encode(calls).decode()}"


def lost_line(count: int, first_ns: int) -> str:
    """Calls that nobody could note."""
    return f"lost\t{count}\t{first_ns}"


def expected_line(number: int, parts: Iterable[Part]) -> str:
    """What a plan expects of this rank in a step."""
    packed = b"".join(
        PART.pack(microbatch, _NUMBER[kind], begin, end) for microbatch, kind, begin, end in parts
    )
    return f"expected\t{number}\t{b64encode(packed).decode()}"


def step_line(expected: int, stretches: Iterable[Stretch]) -> str:
    """What this rank did in a step; ``expected``: by which plan."""
    flat = [
        number
        for microbatch, kind, start, end in stretches
        for number in (microbatch, _NUMBER[kind], start, end)
    ]
    return f"step\t{expected}\t{b64encode(array('q', flat).tobytes()).decode()}"
