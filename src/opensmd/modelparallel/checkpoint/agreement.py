"""Work on files that all ranks of a group do or none: if it fails on one, all of them raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import DistBackendError

from opensmd.modelparallel.communicate import meet_for
from opensmd.modelparallel.exceptions import PeerCheckpointError
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.poisoned_groups import poison
from opensmd.modelparallel.state import state

__all__ = ["meet_for_files", "naming_lost_ranks", "together"]

Result = TypeVar("Result")


class LostRanksError(PeerCheckpointError):
    """Ranks died or did not come, so the fate of their part is unknown."""


def together(group: dist.ProcessGroup, work: Callable[[], Result], *, failed: str, rank: str) -> Result:
    """Do ``work``, wait for the other ranks of ``group``, and return the result if all have succeeded.

    Args:
        failed: the error text on ranks whose own work has succeeded.
        rank: what a rank of this group is called, such as "mp_rank".

    Raises:
        PeerCheckpointError: the work of others has failed, or ranks are lost; this rank's own error is raised
            unchanged.
    """
    failure: Exception | None = None
    results: list[Result] = []
    with naming_lost_ranks(failed):
        try:
            results.append(work())
        except (DistBackendError, LostRanksError):
            raise  # waiting again for lost ranks would be in vain
        except Exception as error:
            failure = error
        failures = exchange(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    if any(failures):
        reasons = "; ".join(f"{rank} {number}: {text}" for number, text in enumerate(failures) if text)
        raise PeerCheckpointError(f"{failed}: {reasons}")
    return results[0]


def meet_for_files(name: str, *kinds: CommGroup, failed: str) -> None:
    """Begin a call that the ranks of a replica make together; see :func:`.meet_for`.

    Args:
        name: what was called.
        kinds: groups that take part besides those of one replica.
        failed: the error text if ranks are lost.

    Raises:
        SMPError: the call comes from a step of a split model, or others have called something else.
        PeerCheckpointError: ranks are lost.
    """
    with naming_lost_ranks(failed):
        meet_for(name, *kinds)


@contextlib.contextmanager
def naming_lost_ranks(failed: str) -> Iterator[None]:
    """Add what has failed to a process group's error about lost ranks; no step waits for them again.

    Raises:
        PeerCheckpointError: in place of a DistBackendError.
    """
    try:
        yield
    except DistBackendError as error:
        poison(state.groups[CommGroup.PP_GROUP], "saving or loading a checkpoint")
        raise LostRanksError(f"{failed}: {error}") from error
