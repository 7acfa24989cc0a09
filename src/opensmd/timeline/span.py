"""One activity of a rank, as recorded and as shown."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLLECTIVES", "COMPUTE", "EXPECTED", "MESSAGES", "PIPELINE", "Span"]

PIPELINE = "pipeline"
COLLECTIVES = "collectives"
MESSAGES = "messages"
EXPECTED = "expected"  # of the pipeline, according to the plan
COMPUTE = ("forward", "backward", "weights")  # the pipeline's kinds of work; its other one is "wait"


class Span(NamedTuple):
    """A stretch of work or waiting.

    Attributes:
        track: its row: PIPELINE, COLLECTIVES, MESSAGES or EXPECTED.
        name: what it is, for example "forward", "all_reduce" or "send to rank 1".
        start_ns, end_ns: the rank's ``time.perf_counter_ns()``; after reading, on one clock for all.
        microbatch: its number, or -1 for none.
        call: the same on all ranks for the same collective, empty for anything else.
        bytes: the number of bytes moved.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    microbatch: int = -1
    call: str = ""
    bytes: int = 0
