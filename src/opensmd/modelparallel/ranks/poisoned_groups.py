"""Process groups on which something has failed, so that nothing waits on them again.

Messages of a failed step may be left, which another engine would take for its own, and ranks that are lost
would be waited for in vain until another timeout.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["poison", "require_sound"]

_poisoned: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def poison(group: dist.ProcessGroup, what: str) -> None:
    """``what`` has failed on this group, or has shown that the next step would."""
    _poisoned.setdefault(group, what)


def require_sound(group: dist.ProcessGroup) -> None:
    """Begin a step only where nothing has failed.

    Raises:
        SMPError: something has, on ``group``.
    """
    if group in _poisoned:
        raise SMPError(
            f"{_poisoned[group]} failed on this process group before; messages may be left, or ranks lost: "
            "call torch.distributed.destroy_process_group() and initialise again"
        )
