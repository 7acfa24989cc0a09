"""Collectives of a group without torch.distributed's Python, for small messages in tight loops.

For a few bytes, a call through ``torch.distributed`` takes three to four times as long as an exchange through
shared memory, and a torch operator twice as long. A ``DirectGroup`` looks up its group only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from opensmd.native import core

if TYPE_CHECKING:
    from opensmd.native.core import DirectGroup

__all__ = ["direct"]


def direct(group: dist.ProcessGroup | None = None) -> DirectGroup:
    """Return the collectives of ``group`` (default: the default group) as methods of an object to keep.

    Each runs immediately in the calling thread with the GIL released, in order with the group's other
    collectives. It writes to its first argument and returns None:

    - ``all_reduce_(tensor, op="sum")``; ``op`` is sum, avg, product, min, max, band, bor or bxor
    - ``broadcast_(tensor, root=0)``; ``root`` is a rank of the group
    - ``all_gather_into_(output, input)``; ``output`` has world size times the elements of ``input``
    - ``reduce_scatter_into_(output, input, op="sum")``; ``input`` has world size times those of ``output``
    - ``all_to_all_into_(output, input)``; both have the same number, in equal parts for all ranks

    They have no gradients, and ``torch.compile`` breaks its graph at them: ``torch.ops.opensmd`` has the
    same as operators. Groups of other backends work, too. Errors are those of ``torch.distributed``.

    Raises:
        ValueError: this process is not in ``group``, or there is no default group.
        BuildError: the native core can neither be loaded nor built.
    """
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError(
            "opensmd.direct() needs a group that this process is a member of"
            + (
                ": call torch.distributed.init_process_group first"
                if group is None
                else f", but got {group!r}"
            )
        )
    return core.DirectGroup(chosen)
