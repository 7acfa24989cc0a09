"""Which modules must be run piece by piece, because others are at work in them. Pure."""

from __future__ import annotations

from dataclasses import replace

from opensmd.modelparallel.planning.plan import Plan, ancestors
from opensmd.modelparallel.planning.trace import ModelTrace

__all__ = ["with_opened"]


def with_opened(plan: Plan, trace: ModelTrace) -> Plan:
    """``plan`` with the modules opened that cannot run as a whole.

    They are those that hooks carried tensors past (``ModelTrace.escapes``), and those that call a module of
    another stage. What is carried or called inside one that runs as a whole stays on its rank, and needs
    nothing.
    """
    names: dict[str, set[str]] = {}
    for alias, name in trace.aliases.items():
        names.setdefault(name, set()).add(alias)
    while True:
        split = plan.split()
        opened: set[str] = set()
        for escape in trace.escapes:
            if escape.around is None or escape.around in split:
                for name in escape.inside:
                    opened.update((name, *ancestors(name)))
        for host, guest in trace.guests:
            if host not in split and (guest in split or plan.homes[host] != plan.homes[guest]):
                opened.update((host, *ancestors(host), *ancestors(guest)))
        for name in tuple(opened):
            for alias in names.get(name, ()):
                opened.update((alias, *ancestors(alias)))
        if opened <= split:
            return plan
        plan = replace(plan, opened=tuple(sorted(opened.union(plan.opened))))
