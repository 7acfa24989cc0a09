"""The message to users when stages do not take the planned times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from opensmd.modelparallel.planning.measured import BetterPlan, StageTimes
from opensmd.modelparallel.planning.plan import Plan, ancestors

__all__ = ["better_plan_text"]

MOST_NAMED = 6


def better_plan_text(
    plan: Plan, measured: Sequence[StageTimes], comparison: BetterPlan, *, replans: bool
) -> str:
    """Describe the times, the better plan and its savings in a few sentences.

    Args:
        plan: the plan that was followed.
        measured: the time of a microbatch on each stage.
        comparison: what follows from that.
        replans: whether the job will switch to the better plan.
    """
    text = (
        f"the partitions do not take the shares of the work that were planned: a microbatch takes "
        f"{_milliseconds(measured)} on partitions 0 to {plan.stages - 1}, planned were {_shares(plan)}"
    )
    if comparison.plan is None:
        return f"{text}. No other cut of the model would be better by more than a few percent"
    better, now = _apart(comparison.better_seconds * 1e3, comparison.seconds * 1e3)
    text += (
        f". By a better plan a step takes about {better} instead of {now} ms ({comparison.saved:.0%} less): "
        f"{_moves(plan, comparison.plan)}"
    )
    if replans:
        return f"{text}. It is followed from the next step on"
    return (
        f'{text}. Set "replan": True to have that done after the first two steps, or place modules with '
        "smp.set_partition"
    )


def _apart(first: float, second: float) -> tuple[str, str]:
    """Format both numbers with just enough digits to tell them apart."""
    texts = [(f"{first:.{digits}f}", f"{second:.{digits}f}") for digits in range(7)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def _milliseconds(measured: Sequence[StageTimes]) -> str:
    return ", ".join(f"{(times.forward + times.backward) * 1e3:.1f}" for times in measured) + " ms"


def _shares(plan: Plan) -> str:
    whole = sum(load.seconds for load in plan.loads)
    if not whole:
        return "sizes alone, not times"
    return ", ".join(f"{load.seconds / whole:.0%}" for load in plan.loads)


def _moves(before: Plan, after: Plan) -> str:
    """Say which modules go where, with neighbours grouped."""
    moved = _moved_wholes(before, after) or _moved(before, after)
    groups = [
        (home, [name for name, _ in group]) for home, group in itertools.groupby(moved, lambda move: move[1])
    ]
    texts = [
        f"{repr(names[0]) if len(names) == 1 else f'{names[0]!r} to {names[-1]!r}'} to partition {home}"
        for home, names in groups
    ]
    left = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {left} more" if left > 0 else "")


def _moved(before: Plan, after: Plan) -> list[tuple[str, int]]:
    return [(name, home) for name, home in after.homes.items() if before.homes[name] != home]


def _moved_wholes(before: Plan, after: Plan) -> list[tuple[str, int]]:
    """Return the largest subtrees that end on one stage and of which no module was there before."""
    staying = after.homes.keys() - dict(_moved(before, after)).keys()
    partly = after.split().union(staying, *map(ancestors, staying))
    return [
        (name, home)
        for name, home in after.homes.items()
        if name not in partly and (name == "" or name.rpartition(".")[0] in partly)
    ]
