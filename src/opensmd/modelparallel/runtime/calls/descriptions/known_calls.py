"""What a rank has learned about calls so far, so that further ones like them cost little."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from opensmd.modelparallel.runtime.calls.descriptions.description import Description, Passed

__all__ = ["KnownCalls"]


@dataclass
class KnownCalls:
    """What is known about calls, by key.

    Attributes:
        descriptions: those of their results.
        passed: those of consecutive calls on other ranks.
        stateful: calls that change buffers or parameters, and so keep the order of the microbatches.
        carrying: calls that leave tensors in attributes for the next one, and so also keep the order.
        spreads: whether calls have left tensors that all ranks have.
        new: how many calls were unlike all before.
    """

    descriptions: dict[Hashable, Description] = field(default_factory=dict)
    passed: dict[Hashable, Passed] = field(default_factory=dict)
    stateful: set[Hashable] = field(default_factory=set)
    carrying: set[Hashable] = field(default_factory=set)
    spreads: bool = False
    new: int = 0
