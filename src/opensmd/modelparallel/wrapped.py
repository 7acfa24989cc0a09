"""The objects that a script has wrapped, as other parts of the library need them.

The classes themselves stand above those parts, which therefore know them by what they can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from opensmd.modelparallel.ranks.shards import Shard

__all__ = ["ElasticReplicas", "SharedScale", "WrappedModel", "WrappedOptimizer", "WrappedScaler"]

Result = TypeVar("Result")


class WrappedModel(Protocol):
    """The script's ``smp.DistributedModel``, as others need it."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def partitioned(self) -> bool:
        """Whether the model's parts have their places."""

    @property
    def running(self) -> int:
        """The number of microbatches of the step that runs; 0 outside steps."""

    @property
    def joining(self) -> bool:
        """Replicas may make different numbers of steps now."""

    def backward(self, tensors: Tensor | Sequence[Tensor], *, retain_graph: bool | None = None) -> None:
        """The backward of a loss over all partitions."""

    def is_local(self, name: str) -> bool:
        """Whether this rank has the data of that parameter, buffer or module."""

    def is_here(self, name: str) -> bool:
        """As :meth:`is_local`; also for a buffer of which every rank of the pipeline has its own copy."""

    def get_module(self) -> nn.Module:
        """The user's module itself."""

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the model has in the place of a parameter that it had before it was sharded."""

    @property
    def shards(self) -> dict[str, Shard]:
        """How parameters are split over the tensor-parallel ranks, by name."""

    def counts_here(self, name: str) -> bool:
        """Whether this parameter counts on this rank in a sum over the ranks of the replica."""

    def require_whole_batch(self, name: str) -> None:
        """Raise if ``name`` was called inside a step."""


class WrappedOptimizer:
    """What ``smp.DistributedOptimizer`` adds to an optimizer's class, as others need it.

    No ABC: its metaclass might not go together with that of the script's optimizer.
    """

    def _smp_after_partition(self, model: WrappedModel) -> None:
        """The model has its parts in their places: keep those of this rank."""
        raise NotImplementedError

    def _smp_follow_plan(self) -> None:
        """Parts of the model have moved, with the state of their parameters: keep those of this rank."""
        raise NotImplementedError

    def _smp_follow_groups(self) -> None:
        """The process groups are others, with the same parts of the model on this rank."""
        raise NotImplementedError

    def _smp_counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter counts on this rank in a sum over the ranks of the replica."""
        raise NotImplementedError

    def _smp_names(self) -> list[str]:
        """The module's name of every parameter, in the whole optimizer's order."""
        raise NotImplementedError

    def _smp_follow_model(self) -> None:
        """The model's parameters have been given other values than the optimizer's."""


class WrappedScaler(Protocol):
    """The script's ``smp.amp.GradScaler``, as others need it."""

    def follow_owners(self) -> None:
        """Take the scale of a rank that has parameters."""


class SharedScale(WrappedScaler, Protocol):
    """The loss scale of the settings ``fp16`` and ``bf16``, as others need it."""

    settings: dict[str, Any]

    def apply(self) -> float:
        """What to multiply a loss by, now."""


class ElasticReplicas(Protocol):
    """The job's replicas that come and go, as a model needs them."""

    def carry_out(self, work: Callable[[], Result], what: str, *, alone: bool = False) -> Result:
        """What ``work`` returns, done by all replicas that are left, or alone by one that has not joined."""

    def keep(self, model: WrappedModel) -> None:
        """Keep what the step that begins is going to change."""

    def border(self, loop: int) -> bool:
        """Between two steps of a loop: let replicas in that wait, or join the others."""

    def begin_loop(self, loop: int) -> None:
        """All members begin their loop of this number."""

    def end(self) -> None:
        """This rank has come to the end of its script."""
