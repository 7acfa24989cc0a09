"""Who has not entered which collective: the first question when training hangs.

Any rank of a group can ask, even while others hang, are stopped or are gone, because the answer is in the
arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from opensmd.collectives import _torch_internals

__all__ = ["MemberState", "Stall", "find_stall", "members", "missing_from", "stall_report"]

# Of the states below.
_STILL = ("its process is stopped", "its process has died", "its process has become another program")


@dataclass(frozen=True)
class MemberState:
    """Where one rank of a group is.

    Attributes:
        rank: in the group.
        state: "running", "its process is stopped", "its process has died", "its process has become another
            program", "has left the group", "has not joined the group" or "in another pid namespace".
        entered: the sequence number of the last collective that it entered, 0 for none.
        completed: that of the last one that it completed.
        last: a description of the entered one, such as "all_reduce(sum, float32, count=4096)"; empty for
            none.
    """

    rank: int
    state: str
    entered: int
    completed: int
    last: str


@dataclass(frozen=True)
class Stall:
    """A collective that some ranks are inside and others have not entered."""

    sequence: int
    operation: str
    inside: tuple[int, ...]
    missing: tuple[MemberState, ...]


def members(group: dist.ProcessGroup | None = None) -> list[MemberState]:
    """Return where every rank of ``group`` is (default: the default group), by rank.

    Raises:
        RuntimeError: the group is not served by shared memory.
    """
    shared = _torch_internals.shared_group(group)
    states = []
    for rank in range(shared.size()):
        status = shared.status(rank)
        last = status["last"]["description"] if status["entered"] else ""
        states.append(MemberState(rank, status["state"], status["entered"], status["completed"], last))
    return states


def find_stall(states: Sequence[MemberState]) -> Stall | None:
    """Return the collective in which ranks wait for others, if any; pure."""
    inside = [member for member in states if member.entered > member.completed]
    if not inside:
        return None
    sequence = min(member.entered for member in inside)
    waiting = [member for member in inside if member.entered == sequence]
    missing = tuple(member for member in states if member.entered < sequence)
    if not missing:
        return None
    return Stall(sequence, waiting[0].last, tuple(member.rank for member in waiting), missing)


def stall_report(group: dist.ProcessGroup | None = None) -> str:
    """Return a readable report: where every rank is and, if ranks wait for others, for whom and in what."""
    states = members(group)
    lines = [_line(member) for member in states]
    stall = find_stall(states)
    if stall is None:
        return "\n".join([*lines, "No rank waits in a collective that another has not entered."])
    who = ", ".join(f"rank {member.rank} ({member.state})" for member in stall.missing)
    lines.append(
        f"Collective {stall.sequence}, {stall.operation}: rank {', '.join(map(str, stall.inside))} inside, "
        f"not yet entered by {who}."
    )
    return "\n".join(lines)


def missing_from(group: dist.ProcessGroup) -> str:
    """Return who is waited for in ``group``, as the end of a sentence; empty if unknown.

    If nobody waits in a collective, it names ranks whose process is not running.
    """
    try:
        states = members(group)
    except RuntimeError:  # no shared memory
        return ""
    stall = find_stall(states)
    if stall is not None:
        return f"; not arrived at {stall.operation}: {_named(group, stall.missing)}"
    still = [member for member in states if member.state in _STILL]
    return f"; {_named(group, still)} does not work" if still else ""


def _named(group: dist.ProcessGroup, of: Sequence[MemberState]) -> str:
    return ", ".join(f"rank {dist.get_global_rank(group, member.rank)} ({member.state})" for member in of)


def _line(member: MemberState) -> str:
    if member.entered == 0:
        return f"rank {member.rank} ({member.state}): no collective yet"
    where = "inside" if member.entered > member.completed else "after"
    return f"rank {member.rank} ({member.state}): {where} collective {member.entered}, {member.last}"
