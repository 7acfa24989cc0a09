"""Bytes of one rank, of what, where a stage is shared by tensor-parallel ranks and by replicas; pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from opensmd.modelparallel.planning.plan import StageLoad

__all__ = ["KEPT", "RankBytes", "Sharing", "bytes_of_rank"]

KEPT = 1 / 16  # of the fullest moment: ``kHeadroom`` of csrc/torch/memory


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a stage is shared, and what its numbers are.

    Attributes:
        tensor: ranks that share each tensor.
        replicas: of the whole model.
        sharded: replicas that share out parameters, gradients and the optimizer's state.
        shard_optimizer: all replicas share out the optimizer's state alone.
        half: parameters of 16 bits with masters of 32.
        optimizer_bytes: state of the optimizer, in bytes a byte of FP32 parameters.

    Raises:
        ValueError: ``replicas`` is no multiple of ``sharded``.
    """

    tensor: int = 1
    replicas: int = 1
    sharded: int = 1
    shard_optimizer: bool = False
    half: bool = False
    optimizer_bytes: float = 2.0

    def __post_init__(self) -> None:
        if self.replicas % self.sharded:
            raise ValueError(f"{self.replicas} replicas cannot be cut into groups of {self.sharded}")


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The bytes that a rank needs, by what they are for.

    ``new_gradients`` exist beside the gradients they are added to, ``buckets`` are what replicas add up.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    new_gradients: float
    buckets: float

    @property
    def total(self) -> float:
        """The bytes for all of that."""
        total: float = sum(astuple(self))
        return total

    def resident(self, interpreter: float) -> float:
        """The bytes of the process: with what large tensors leave for the next step, and the interpreter."""
        return self.total * (1 + KEPT) + interpreter


def bytes_of_rank(load: StageLoad, sharing: Sharing) -> RankBytes:
    """The bytes of a rank of a stage whose ``load`` is that of a model of FP32 that nobody shares.

    Every tensor counts as shared evenly by the tensor-parallel ranks, which holds for transformers but for
    their norms.
    """
    width = 0.5 if sharing.half else 1.0
    whole = load.parameter_bytes / sharing.tensor
    kept = whole / sharing.sharded
    states = max(sharing.sharded, sharing.replicas if sharing.shard_optimizer else 1)
    return RankBytes(
        parameters=kept * width,
        gradients=kept * width,
        masters=2 * kept if sharing.half else 0.0,  # and their gradients
        optimizer=whole * sharing.optimizer_bytes / states,
        activations=load.kept_bytes * width / sharing.tensor,
        new_gradients=load.new_gradient_bytes * width / sharing.tensor,
        buckets=whole * width if sharing.replicas > sharing.sharded == 1 else 0.0,
    )
