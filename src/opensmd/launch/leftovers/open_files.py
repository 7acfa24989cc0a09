"""How many files the launcher may have open: checked before it starts ranks, which then fail half way."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["allow_for"]

OWN = 24  # the agent's, its store's and the console's
A_RANK = 8  # two pipes, two files, and connections to the store


def allow_for(ranks: int) -> None:
    """Raise this process's soft limit to what a job needs, where the hard limit lets it.

    Raises:
        ValueError: the hard limit is too low.
    """
    needed = OWN + A_RANK * ranks + len(list(Path("/dev/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(_too_few(ranks, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _too_few(ranks: int, allowed: int) -> str:
    who = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    return (
        f"{who} more open files than the {allowed} that this process may have: raise the limit (ulimit -n "
        "1024) or start fewer ranks with -n"
    )
