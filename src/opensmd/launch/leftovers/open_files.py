"""The launcher's open files: where the system lists them, and how many are allowed.

Both are checked before ranks are started, which would otherwise fail half way.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["allow_for", "folder"]

OWN = 24  # for the agent, its store and the console
A_RANK = 9  # two pipes, two files, and connections to the store
FOLDERS = ("/proc/self/fd", "/dev/fd")  # the second is a link to the first, and missing in some sandboxes


def folder() -> str:
    """Return where this process's open files are listed by number and can be reopened.

    Raises:
        ValueError: there is no such place.
    """
    for place in FOLDERS:
        if os.path.isdir(place):  # noqa: PTH112 - the guardian asks, and knows names alone
            return place
    raise ValueError(
        "/proc is missing here, in which smdrun finds its ranks and what they leave behind: mount it with "
        "`mount -t proc proc /proc`, or run the sandbox with one (bwrap --proc /proc)"
    )


def allow_for(ranks: int) -> None:
    """Raise this process's soft limit to what a job needs, if the hard limit allows.

    Raises:
        ValueError: the hard limit is too low, or there is no ``/proc``.
    """
    needed = OWN + A_RANK * ranks + len(list(Path(folder()).iterdir()))
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
