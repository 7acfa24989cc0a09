"""What happens in a case: drawn from a seed, so that every case can be had again."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FATAL", "MISMATCHES", "OPERATIONS", "Case", "draw"]

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"]
MISMATCHES = ["other operation", "other size", "other dtype"]
FATAL = ["kill", "exit", "stop", "absent"]
FAULTS = [*FATAL, *MISMATCHES, "late"]


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        ranks: of the job.
        members: global ranks of the group whose call goes wrong.
        victim: the member, by global rank, that misbehaves.
        operation: what all members call.
        fault: what the victim does instead of its last call.
        calls: sound calls before that.
        elements: of each rank's tensor.
    """

    ranks: int
    members: tuple[int, ...]
    victim: int
    operation: str
    fault: str
    calls: int
    elements: int


def draw(seed: int, trial: int, ranks: list[int]) -> Case:
    """Case ``trial`` of the campaign ``seed``."""
    chance = random.Random(seed * 1_000_003 + trial)
    size = chance.choice(ranks)
    members = tuple(range(size))
    if size > 2 and chance.random() < 0.5:
        members = tuple(sorted(chance.sample(members, chance.randint(2, size - 1))))
    operation = chance.choice(OPERATIONS)
    faults = [f for f in FAULTS if operation != "barrier" or f not in ("other size", "other dtype")]
    return Case(
        ranks=size,
        members=members,
        victim=chance.choice(members),
        operation=operation,
        fault=chance.choice(faults),
        calls=chance.randint(0, 5),
        elements=chance.choice([1, 100, 10_000, 1_000_000]),
    )
