"""What all ranks must call at the same point of their scripts has no place in a step of a split model.

Its microbatches take turns, on each rank in another order, so ranks that wait for each other in one would
wait until the timeout, or meet in different microbatches.
"""

from __future__ import annotations

from opensmd.modelparallel.dry_run.dry import is_tracing
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state

__all__ = ["require_meeting"]


def require_meeting(name: str, *, instead: str = "") -> None:
    """Refuse a call in which ranks meet if it comes from inside a step of a split model.

    Args:
        name: what was called.
        instead: what to do; by default to call it after the step.

    Raises:
        SMPError: it does.
    """
    if not state.initialized or state.groups.size(CommGroup.PP_GROUP) == 1:
        return
    if is_tracing() or (state.model is not None and state.model.running > 0):
        raise SMPError(
            f"{name} was called on rank {state.rank} inside a smp.step function. Its microbatches take "
            "turns, on each rank in an order of its own, and rank 0 runs it once more to plan the "
            f"partitions, so the ranks would not meet: {instead or 'call it after the step'}"
        )
