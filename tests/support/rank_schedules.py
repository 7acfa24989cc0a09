"""The schedules of all ranks, as the engine makes them for a plan."""

from __future__ import annotations

from typing import Any

from opensmd.modelparallel.planning.plan import Crossing, Plan
from opensmd.modelparallel.planning.policies.limits import most_active
from opensmd.modelparallel.runtime.turns.rank_schedule import RankSchedule

__all__ = ["in_a_v", "rank_schedules", "route"]


def route(ranks: int, pipeline: str = "interleaved") -> list[int]:
    """The ranks that a microbatch passes, in order."""
    down = list(range(ranks))
    return [*down, *reversed(down)] if in_a_v(pipeline) else down


def in_a_v(pipeline: str) -> bool:
    """Whether a schedule wants two stages a rank."""
    return pipeline == "v"


def rank_schedules(ranks: int, pipeline: str = "interleaved", **settings: Any) -> list[RankSchedule]:
    """Those of a chain or, for ``"v"``, of a V."""
    ways = {(way, way + 1) for way in range(ranks - 1)}
    if in_a_v(pipeline):
        ways |= {(target, source) for source, target in ways}
    crossings = tuple(Crossing(source=a, target=b, tensors=1, bytes=4) for a, b in sorted(ways))
    defaults = {"active_microbatches": most_active(ranks, None), "in_order": False, "virtual_stages": 1}
    return [
        RankSchedule(
            plan=Plan(stages=ranks, homes={"": 0}, crossings=crossings),
            stage=stage,
            partitions=ranks,
            pipeline=pipeline,  # type: ignore[arg-type]
            **{**defaults, **settings},
        )
        for stage in range(ranks)
    ]
