"""The interface of policies: given the state of a rank's microbatches, choose which one continues.

Pure: a policy knows no tensors, threads or messages, only how far each microbatch has come. The results of a
step do not depend on it.
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
    """The state of a rank's microbatches.

    Attributes:
        progress: of every microbatch; none is RUNNING, and they start in order.
        chunks: the rank's chunk that each is in, or enters next.
        weights: the pending weight gradients, as (microbatch, chunk), earliest first.
    """

    progress: Sequence[Progress]
    chunks: Sequence[int]
    weights: Sequence[tuple[int, int]]


class Choice(NamedTuple):
    """What a rank does next: continue ``microbatch``, or compute its weight gradients.

    Attributes:
        microbatch: which one.
        weights: the chunk whose weight gradients to compute; None to continue the microbatch itself.
        instead_of: what the table has before that, if it only waits for a message.
    """

    microbatch: int
    weights: int | None = None
    instead_of: Action | None = None


class Policy(Protocol):
    """Chooses what a rank does next.

    Attributes:
        waits_in_place: whether microbatches wait for messages without asking the policy.
        chunks: how many of the model's stages the rank has, as far as the policy orders them.
    """

    waits_in_place: bool
    chunks: int

    def pick(self, standing: Standing, can_go_on: Callable[[int], bool]) -> Choice | None:
        """Return what comes next; None to wait for a message.

        Args:
            standing: the state of the microbatches.
            can_go_on: whether what a microbatch waits for has come; called only for suspended ones.
        """

    def holds(self, microbatch: int, progress: Sequence[Progress]) -> bool:
        """Whether a microbatch must wait for others before its backward, whatever has come."""
