"""How many files the launcher may have open: checked before it starts ranks, which then fail half way."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["allow_for", "too_few"]

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
        raise ValueError(too_few(ranks))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def too_few(ranks: int) -> str:
    """The error for a limit that is too low for this many ranks."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    who = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    return (
        f"{who} more open files than the {allowed} that this process may have: raise the limit (ulimit -n "
        "1024) or start fewer ranks with -n"
    )
