"""What a rank has learned of calls in the steps so far, so that further ones like them cost little."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from opensmd.modelparallel.runtime.calls.descriptions.description import Description, Passed

__all__ = ["KnownCalls"]


@dataclass
class KnownCalls:
    """What is known of calls, by key.

    Attributes:
        descriptions: of their results.
        passed: of calls of other ranks that follow each other.
        stateful: calls that change buffers or parameters; they keep the order of the microbatches.
        carrying: calls that leave tensors in attributes in which the next may go on; they keep it, too.
        new: how often a call was unlike all before.
    """

    descriptions: dict[Hashable, Description] = field(default_factory=dict)
    passed: dict[Hashable, Passed] = field(default_factory=dict)
    stateful: set[Hashable] = field(default_factory=set)
    carrying: set[Hashable] = field(default_factory=set)
    new: int = 0
