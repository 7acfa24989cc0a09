"""Which modules must run piece by piece, because others take part in them; pure."""

from __future__ import annotations

from dataclasses import replace

from opensmd.modelparallel.planning.plan import Plan, ancestors
from opensmd.modelparallel.planning.trace import ModelTrace

__all__ = ["with_opened"]


def with_opened(plan: Plan, trace: ModelTrace) -> Plan:
    """Return ``plan`` with the modules opened that cannot run as a whole.

    These are modules that hooks carried tensors past (``ModelTrace.escapes``), and those that call a module
    of another stage. What is carried or called inside a module that runs as a whole stays on its rank, and is
    no problem.
    """
    while True:  # an opened module may have called another one as a whole, which must then be opened, too
        split = plan.split()
        opened = _with_ancestors(_passed_by(split, trace) | _called_across(plan, split, trace))
        opened |= _with_ancestors({alias for alias, name in trace.aliases.items() if name in opened})
        if opened <= split:
            return plan
        plan = replace(plan, opened=tuple(sorted(opened.union(plan.opened))))


def _passed_by(split: set[str], trace: ModelTrace) -> set[str]:
    """Return the modules that tensors are carried past, except inside a module that runs as a whole."""
    return {
        name
        for escape in trace.escapes
        if escape.around is None or escape.around in split
        for name in escape.inside
    }


def _called_across(plan: Plan, split: set[str], trace: ModelTrace) -> set[str]:
    """Return the modules that call one outside themselves that is split or on another stage."""
    callers: set[str] = set()
    for host, guest in trace.guests:
        if host not in split and (guest in split or plan.homes[host] != plan.homes[guest]):
            callers.update((host, *ancestors(guest)))
    return callers


def _with_ancestors(names: set[str]) -> set[str]:
    return names.union(*map(ancestors, names))
