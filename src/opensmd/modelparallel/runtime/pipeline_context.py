"""What the microbatches of a pipeline have in common on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from opensmd.modelparallel.runtime.side_effects.escaped import Carried
from opensmd.modelparallel.runtime.side_effects.random import ReplicatedRandom
from opensmd.modelparallel.runtime.tensors.tags import Tag

if TYPE_CHECKING:
    from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
    from opensmd.modelparallel.runtime.calls.descriptions import Description
    from opensmd.modelparallel.runtime.messages.transport import Message, Transport

__all__ = ["PipelineContext", "Wait"]


class Wait(Protocol):
    """Lets others go on until a message has come."""

    def __call__(
        self, microbatch: int, messages: list[Message], until: Callable[[], bool] | None = None
    ) -> None:
        """Return when one of ``messages`` has come, or when ``until`` holds."""


@dataclass
class PipelineContext:
    """One rank's side of a pipeline.

    Attributes:
        rank, size: this rank of the pipeline, and how many there are.
        others: the other ranks.
        transport: to the other ranks.
        random: for replicated tensors.
        carried: tells tensors that only this rank has from replicated ones.
        descriptions: what is known of results, by key.
        epoch: changes when a parameter's ``requires_grad`` does; part of every key.
        placed_memory: memory of buffers that live on one rank, and of this rank's parameters.
        replicated_memory: memory of buffers that all ranks keep alike (``untyped_storage()._cdata``).
        sent_since_flush: something may still have to leave before it may be changed.
        wait: gives the rank to another microbatch meanwhile.
        wait_for_earlier: until all earlier microbatches have been through their forwards on this rank.
        settle: runs the backward that a microbatch has deferred.
        begun: microbatches of earlier steps.
        new_calls: how often a call was unlike all before.
        borrowed: tags of this step's tensors that a later microbatch than their own has used.
        stateful: calls that change buffers or parameters; they keep the order of the microbatches.
    """

    rank: int
    size: int
    transport: Transport
    random: ReplicatedRandom
    carried: Carried
    wait: Wait
    wait_for_earlier: Callable[[int], None]
    settle: Callable[[CallRunner], None]
    descriptions: dict[Any, Description] = field(default_factory=dict)
    stateful: set[Any] = field(default_factory=set)
    epoch: int = 0
    begun: int = 0
    new_calls: int = 0
    borrowed: set[Tag] = field(default_factory=set)
    placed_memory: frozenset[int] = frozenset()
    replicated_memory: frozenset[int] = frozenset()
    sent_since_flush: bool = False
    others: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.others = [rank for rank in range(self.size) if rank != self.rank]
