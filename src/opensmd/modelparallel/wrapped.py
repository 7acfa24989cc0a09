"""Interfaces of the objects that a script has wrapped, for the rest of the library.

The classes themselves are in higher layers, which the rest must not import.
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
    """Interface of the script's ``smp.DistributedModel``."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def partitioned(self) -> bool:
        """Whether the model has been partitioned."""

    @property
    def running(self) -> int:
        """The number of microbatches of the running step; 0 outside steps."""

    @property
    def joining(self) -> bool:
        """Whether replicas may currently run different numbers of steps."""

    def backward(self, tensors: Tensor | Sequence[Tensor], *, retain_graph: bool | None = None) -> None:
        """Run the backward of a loss over all partitions."""

    def is_local(self, name: str) -> bool:
        """Whether this rank holds the data of that parameter, buffer or module."""

    def home_of(self, name: str) -> int:
        """Return the pipeline rank that holds an entry of the state dict."""

    def is_here(self, name: str) -> bool:
        """Like :meth:`is_local`, but also True for a buffer that every rank of the pipeline has a copy of."""

    def get_module(self) -> nn.Module:
        """Return the user's module."""

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the model now has in place of a parameter from before it was sharded."""

    def has_replaced(self, parameter: nn.Parameter) -> bool:
        """Whether the model has another in the place of a parameter that it had when it was wrapped."""

    @property
    def shards(self) -> dict[str, Shard]:
        """How parameters are split over the tensor-parallel ranks, by name."""

    def counts_here(self, name: str) -> bool:
        """Whether this rank contributes this parameter to sums over the ranks of the replica."""

    def require_whole_batch(self, name: str) -> None:
        """Raise if ``name`` was called inside a step."""


class WrappedOptimizer:
    """Interface of what ``smp.DistributedOptimizer`` adds to an optimizer's class.

    Not an ABC: its metaclass might conflict with that of the script's optimizer.
    """

    def _smp_after_partition(self, model: WrappedModel) -> None:
        """Keep this rank's parameters, now that the model is partitioned."""
        raise NotImplementedError

    def _smp_follow_plan(self) -> None:
        """Keep this rank's parameters after parts of the model have moved, with their state."""
        raise NotImplementedError

    def _smp_follow_groups(self) -> None:
        """Use the new process groups; this rank keeps the same parts of the model."""
        raise NotImplementedError

    def _smp_follow_device(self) -> None:
        """Move the state to the devices of the parameters."""
        raise NotImplementedError

    def _smp_counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank contributes a parameter to sums over the ranks of the replica."""
        raise NotImplementedError

    def _smp_names(self) -> list[str]:
        """Return the module's names of all parameters, in the whole optimizer's order."""
        raise NotImplementedError

    def _smp_follow_model(self) -> None:
        """Take over new values of the model's parameters."""


class WrappedScaler(Protocol):
    """Interface of the script's ``smp.amp.GradScaler``."""

    def follow_owners(self) -> None:
        """Adopt the scale of a rank that has parameters."""


class SharedScale(WrappedScaler, Protocol):
    """Interface of the loss scale of the settings ``fp16`` and ``bf16``."""

    settings: dict[str, Any]

    def apply(self) -> float:
        """Return the current factor for a loss."""


class ElasticReplicas(Protocol):
    """Interface of an elastic job's replicas."""

    def carry_out(self, work: Callable[[], Result], what: str, *, alone: bool = False) -> Result:
        """Run ``work`` on all remaining replicas, or alone on one that has not joined; return its result."""

    def keep(self, model: WrappedModel) -> None:
        """Save what the step that is starting will change."""

    def border(self, loop: int) -> bool:
        """Between two steps of a loop, admit waiting replicas, or join the others."""

    def begin_loop(self, loop: int) -> None:
        """Start the loop of this number together with all members."""

    def end(self) -> None:
        """Note that this rank has reached the end of its script."""
