"""Requiring replicas to train the same parameters, because they average the gradients of nothing else.

Replicas that freeze different parameters would begin different collectives. Where these happen to have the
same sizes, gradients of one parameter would be averaged with those of another.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import gathering
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.sendable import control_device

__all__ = ["TrainedAlike"]


class TrainedAlike:
    """``requires_grad`` of what several ranks have of a model.

    Args:
        named: the parameters of this rank with their names, which are the same on all of these ranks.
        group: the ranks.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._named = list(named)
        self._group = group
        self._device = control_device(group)
        self._trained: list[bool] = []
        self._mine = torch.empty(0)
        self._arriving: tuple[Tensor, dist.Work] | None = None

    def begin(self) -> None:
        """Tell the other ranks what this one trains, and do not wait; all of them must call."""
        trained = [parameter.requires_grad for _, parameter in self._named]
        if trained != self._trained:
            self._trained = trained
            self._mine = torch.tensor(trained, dtype=torch.uint8, device=self._device)
        if trained:
            self._arriving = gathering(self._mine, self._group)

    def end(self) -> None:
        """Wait for what the others have told, if anything.

        Raises:
            SMPError: on all of them, naming the first parameter that only some of them train.
        """
        if self._arriving is None:
            return
        (everyone, work), self._arriving = self._arriving, None
        work.wait()
        by_rank = everyone.view(self._group.size(), -1)
        if not bool((by_rank == by_rank[0]).all()):
            self._refuse(by_rank)

    def _refuse(self, by_rank: Tensor) -> None:
        differing = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        first = differing[0]
        ranks = dist.get_process_group_ranks(self._group)
        training = [rank for rank, trains in zip(ranks, by_rank[:, first].tolist(), strict=True) if trains]
        frozen = [rank for rank in ranks if rank not in training]
        others = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise SMPError(
            f"requires_grad of parameter {self._named[first][0]!r}{others} is True on {_named(training)} and "
            f"False on {_named(frozen)}, but replicas average the gradients of the same parameters. Freeze "
            "and unfreeze them on all ranks alike, between steps; an `if smp.rank() == 0:` or "
            "`if smp.dp_rank() == 0:` around it is the usual cause"
        )


def _named(ranks: list[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(ranks) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
