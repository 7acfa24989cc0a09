"""Requiring that ranks have called the same, before they wait for each other in it.

Whatever ranks do together begins with the same small exchange. Otherwise, ranks in different calls would take
each other's numbers for their own, or learn only of collectives that no script has called.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel._torch_internals import gathered_vectors, gathering
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange

__all__ = ["Four", "begin_meeting", "meet"]

Four = tuple[int, int, int, int]


def meet(
    what: str, group: dist.ProcessGroup, device: torch.device, numbers: Four = (0, 0, 0, 0)
) -> list[Four]:
    """Wait for the other ranks of ``group``; return the ``numbers`` of each.

    Args:
        what: what this rank has called.
        device: where small tensors must be for the group to carry them.

    Raises:
        SMPError: on all ranks, if they have called different things.
    """
    return _compared(gathered_vectors(_message(what, device, numbers), group), what, group)


def begin_meeting(
    what: str, group: dist.ProcessGroup, device: torch.device, numbers: Four
) -> Callable[[], list[Four]]:
    """Like :func:`meet`, but return what waits; nothing else of the group may be called before that."""
    everyone, work = gathering(_message(what, device, numbers), group)

    def wait() -> list[Four]:
        work.wait()
        return _compared(everyone, what, group)

    return wait


def _message(what: str, device: torch.device, numbers: Four) -> Tensor:
    # In one collective, because every step pays for this.
    return torch.frombuffer(array("q", [zlib.crc32(what.encode()), *numbers]), dtype=torch.int64).to(device)


def _compared(everyone: Tensor, what: str, group: dist.ProcessGroup) -> list[Four]:
    found = everyone.tolist()
    if len({*found[::5]}) > 1:
        _refuse(what, group)
    return [tuple(found[first : first + 4]) for first in range(1, len(found), 5)]


def _refuse(what: str, group: dist.ProcessGroup) -> None:
    calls = exchange(what, group)
    ranks = dist.get_process_group_ranks(group)
    said = ", ".join(f"rank {rank} called {call}" for rank, call in zip(ranks, calls, strict=True))
    raise SMPError(
        f"ranks that work together have made different calls: {said}. All of them make the same calls in the "
        "same order, also where only one needs the result; an `if smp.rank() == 0:` around one is the usual "
        "cause"
    )
