"""Requiring replicas to train the same parameters, because they average the gradients of nothing else.

Replicas that freeze different parameters would begin different collectives. Where these happen to have the
same sizes, gradients of one parameter would be averaged with those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.meeting import Four, begin_meeting, meet
from opensmd.modelparallel.ranks.sendable import control_device

__all__ = ["TrainedAlike"]

_STEP = "a step that trains"


class TrainedAlike:
    """``requires_grad`` of what several ranks have of a model.

    Args:
        named: the parameters of this rank with their names, which are the same on all of these ranks.
        group: the ranks.
        at_once: they share more in a step than gradients, and meet in it anyway.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup, *, at_once: bool = False
    ) -> None:
        self.at_once = at_once
        self._named = list(named)
        self._group = group
        self._device = control_device(group)
        self._trained: list[bool] = []
        self._meeting: Callable[[], list[Four]] | None = None

    def compare(self) -> None:
        """Compare what the ranks train; all of them must call.

        Raises:
            SMPError: on all of them, naming the first parameter that only some of them train.
        """
        self._require_same(meet(_STEP, self._group, self._device, self._numbers()))

    def begin(self) -> None:
        """Tell the other ranks what this one trains, and do not wait; all of them must call."""
        self._meeting = begin_meeting(_STEP, self._group, self._device, self._numbers())

    def end(self) -> None:
        """Wait for what the others have told, if anything.

        Raises:
            SMPError: as :meth:`compare`.
        """
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            self._require_same(meeting())

    def _numbers(self) -> Four:
        self._trained = [parameter.requires_grad for _, parameter in self._named]
        # Hashes of booleans are the same in every process.
        return hash(tuple(self._trained)), 0, 0, 0

    def _require_same(self, found: list[Four]) -> None:
        if len({*found}) > 1:
            self._refuse()

    def _refuse(self) -> None:
        everyone = exchange(self._trained, self._group)
        differing = [place for place, found in enumerate(zip(*everyone, strict=True)) if len({*found}) > 1]
        first = differing[0]
        ranks = dist.get_process_group_ranks(self._group)
        training = [rank for rank, trained in zip(ranks, everyone, strict=True) if trained[first]]
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
