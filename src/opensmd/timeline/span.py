"""One thing that one rank did, as it is recorded and as it is shown."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLLECTIVES", "COMPUTE", "EXPECTED", "MESSAGES", "PIPELINE", "Span"]

PIPELINE = "pipeline"
COLLECTIVES = "collectives"
MESSAGES = "messages"
EXPECTED = "expected"  # of the pipeline, by the plan
COMPUTE = ("forward", "backward", "weights")  # the pipeline's kinds of work; its other one is "wait"


class Span(NamedTuple):
    """A stretch of work or waiting.

    Attributes:
        track: the row that it belongs to, PIPELINE, COLLECTIVES, MESSAGES or EXPECTED.
        name: what it is, "forward", "all_reduce" or "send to rank 1" for example.
        start_ns, end_ns: ``time.perf_counter_ns()`` of the rank; on one clock for all once they are read.
        microbatch: which one, -1 for none.
        call: the same on all ranks for the same collective, empty for anything else.
        bytes: how many it moves.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    microbatch: int = -1
    call: str = ""
    bytes: int = 0
