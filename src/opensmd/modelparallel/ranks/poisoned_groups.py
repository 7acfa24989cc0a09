"""Remembering process groups on which something has failed, so that nothing waits on them again.

Leftover messages of a failed step could be mistaken for another engine's, and waiting for lost ranks would
only end with another timeout.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["poison", "require_sound"]

_poisoned: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def poison(group: dist.ProcessGroup, what: str) -> None:
    """Note that ``what`` has failed on this group, or has shown that the next step would fail."""
    _poisoned.setdefault(group, what)


def require_sound(group: dist.ProcessGroup) -> None:
    """Raise before a step if something has failed.

    Raises:
        SMPError: something has failed on ``group``.
    """
    if group in _poisoned:
        raise SMPError(
            f"{_poisoned[group]} failed on this process group before; messages may be left, or ranks lost: "
            "call torch.distributed.destroy_process_group() and initialise again"
        )
