"""What a policy is: it is told where the microbatches of a rank are, and says which goes on.

Pure: it knows no tensors, threads or messages, only how far each microbatch has come. The results of a step
do not depend on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from opensmd.modelparallel.planning.schedules.tables import Action

__all__ = ["Choice", "Policy", "Progress", "Standing"]


class Progress(enum.Enum):
    """How far a microbatch has come on this rank."""

    NEW = "new"
    RUNNING = "running"
    FORWARD = "waits in forward"
    AT_FORWARD = "waits before a further part of its forward"
    AT_BACKWARD = "waits before backward"
    BACKWARD = "waits in backward"
    DONE = "done"


class Standing(NamedTuple):
    """Where the microbatches of a rank are.

    Attributes:
        progress: of every one; none is RUNNING, and they begin in their order.
        chunks: the chunk of the rank that each is in, or comes to next.
        weights: the weight gradients that are left, as (microbatch, chunk), earliest first.
    """

    progress: Sequence[Progress]
    chunks: Sequence[int]
    weights: Sequence[tuple[int, int]]


class Choice(NamedTuple):
    """What a rank does next: it goes on with ``microbatch``, or computes weight gradients of one.

    Attributes:
        microbatch: which one.
        weights: the chunk whose weight gradients are computed; None to go on with the microbatch itself.
        instead_of: what the table has before that, if it only waits for a message.
    """

    microbatch: int
    weights: int | None = None
    instead_of: Action | None = None


class Policy(Protocol):
    """Chooses what a rank does next.

    Attributes:
        waits_in_place: what waits for a message does so without asking.
        chunks: how many of the model's stages the rank has, as far as their order is the policy's.
    """

    waits_in_place: bool
    chunks: int

    def pick(self, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """What comes next; None to wait for a message.

        Args:
            standing: of the microbatches.
            can_go_on: whether what a microbatch waits for has come; asked for suspended ones only.
        """

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """Whether a microbatch must wait before its backward for others, whatever has come."""
