"""Which combinations of degrees there are, and what they are called; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PRECISIONS", "Degrees", "all_degrees"]

PRECISIONS = ("fp32", "bf16", "fp16")
STAGES, TENSOR, COPIES, SHARDED = (1, 2, 4), (1, 2), (1, 2), (1, 2)


@dataclass(frozen=True)
class Degrees:
    """How many ranks share what.

    Attributes:
        stages: partitions.
        tensor: ranks that share the tensors of distributed modules.
        copies: of what the others have; each gets its part of the batch.
        sharded: ranks that share out the parameters of a copy, and its part of the batch.
    """

    stages: int = 1
    tensor: int = 1
    copies: int = 1
    sharded: int = 1

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.stages * self.tensor * self.copies * self.sharded


def all_degrees(ranks: int) -> Iterator[Degrees]:
    """Those that need at most so many processes, small ones first."""
    found = itertools.starmap(Degrees, itertools.product(STAGES, TENSOR, COPIES, SHARDED))
    yield from sorted(
        (degrees for degrees in found if degrees.ranks <= ranks), key=lambda degrees: degrees.ranks
    )
