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
        rank, size: this rank of the pipeline, and how many there are.
        others: the other ranks.
        transport: to the other ranks.
        random: for replicated tensors.
        script_random: of Python and NumPy.
        escaped: tells tensors that only this rank has from replicated ones.
        buffers: of split modules, which change in the order of the microbatches.
        trained: which parameters are.
        calls: what is known of them.
        placed_memory: memory of buffers that live on one rank, and of this rank's parameters.
        replicated_memory: memory of buffers that all ranks keep alike (``untyped_storage()._cdata``).
        divided: buffers of which modules in different places have copies.
        sum_warning: sees every backward of torch's own.
        offloading: of checkpointed activations; None keeps them in memory.
        sent_since_flush: something may still have to leave before it may be changed.
        replacing: how many calls of ``functional_call`` are open on this rank.
        begun: microbatches of earlier steps.
        borrowed: tags of tensors that a later microbatch than their own has used in this step.
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
    replacing: int = 0
    begun: int = 0
    borrowed: set[Tag] = field(default_factory=set)
    sent_since_flush: bool = False
    others: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def is_replicated(self, tensor: Tensor) -> bool:
        """Whether this is a buffer that all ranks keep alike, or a view of one."""
        return lies_in(tensor, self.replicated_memory)

    def lasts(self, tensor: Tensor) -> bool:
        """Whether this is a buffer of the model, a parameter of this rank, or a view of one."""
        return lies_in(tensor, self.placed_memory) or self.is_replicated(tensor)
