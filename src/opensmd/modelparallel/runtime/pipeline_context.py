"""What the microbatches of a pipeline have in common on one rank, from the first step to the last."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning
from opensmd.modelparallel.runtime.calls.descriptions.known_calls import KnownCalls
from opensmd.modelparallel.runtime.messages.transport import Transport
from opensmd.modelparallel.runtime.side_effects.buffers import OrderedBuffers
from opensmd.modelparallel.runtime.side_effects.escaped import EscapedTensors
from opensmd.modelparallel.runtime.side_effects.random_numbers.script_generators import ScriptRandom
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import ReplicatedRandom
from opensmd.modelparallel.runtime.tensors.storages import lies_in
from opensmd.modelparallel.runtime.tensors.tags import Tag
from opensmd.modelparallel.runtime.trained_parameters import TrainedParameters

__all__ = ["PipelineContext"]


@dataclass
class PipelineContext:
    """One rank's side of a pipeline.

    Attributes:
        rank, size: this rank's position in the pipeline, and the number of ranks.
        others: the other ranks.
        transport: the one to the other ranks.
        random: the generator for replicated tensors.
        script_random: the generators of Python and NumPy.
        escaped: tells apart replicated tensors and those that only this rank has.
        buffers: those of split modules, which change in the order of the microbatches.
        trained: which parameters are trained.
        calls: what is known about calls.
        placed_memory: memory of buffers that live on one rank, and of this rank's parameters.
        replicated_memory: memory of buffers that are equal on all ranks (``untyped_storage()._cdata``).
        divided: buffers that modules on different ranks have copies of.
        sum_warning: sees every backward of torch's own.
        offloading: that of checkpointed activations; None keeps them in memory.
        sent_since_flush: whether something sent may still have to leave before it may be changed.
        moved: whether a call of this step has changed a tensor in place that lives elsewhere since.
        replacing: the number of open calls of ``functional_call`` on this rank.
        begun: the number of microbatches in earlier steps.
        borrowed: tags of tensors used in this step by a later microbatch than their own.
    """

    rank: int
    size: int
    transport: Transport
    random: ReplicatedRandom
    script_random: ScriptRandom
    escaped: EscapedTensors
    buffers: OrderedBuffers
    trained: TrainedParameters
    placed_memory: frozenset[int]
    replicated_memory: frozenset[int]
    divided: frozenset[Tensor]
    sum_warning: SumWarning
    offloading: Offloading | None = None
    calls: KnownCalls = field(default_factory=KnownCalls)
    moved: bool = False
    replacing: int = 0
    begun: int = 0
    borrowed: set[Tag] = field(default_factory=set)
    sent_since_flush: bool = False
    others: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def is_replicated(self, tensor: Tensor) -> bool:
        """Whether this is a buffer that is equal on all ranks, or a view of one."""
        return lies_in(tensor, self.replicated_memory)

    def lasts(self, tensor: Tensor) -> bool:
        """Whether this is a buffer of the model, a parameter of this rank, or a view of one."""
        return lies_in(tensor, self.placed_memory) or self.is_replicated(tensor)
