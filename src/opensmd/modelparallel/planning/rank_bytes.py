"""The bytes of one rank by purpose, if tensor-parallel ranks and replicas share a stage; pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from opensmd.modelparallel.planning.plan import StageLoad

__all__ = ["KEPT", "RankBytes", "Sharing", "bytes_of_rank"]

KEPT = 1 / 16  # of the peak: ``kHeadroom`` in csrc/torch/memory


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a stage is shared, and in what precision.

    Attributes:
        tensor: ranks that share each tensor.
        replicas: those of the whole model.
        sharded: replicas that split parameters, gradients and the optimizer's state.
        shard_optimizer: whether all replicas split only the optimizer's state.
        half: whether there are 16-bit parameters with 32-bit masters.
        optimizer_bytes: bytes of optimizer state per byte of FP32 parameters.

    Raises:
        ValueError: ``replicas`` is not a multiple of ``sharded``.
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
    """The bytes that a rank needs, by purpose.

    ``new_gradients`` exist next to the gradients they are added to; ``buckets`` are what replicas add up.
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
        """The sum of all bytes."""
        total: float = sum(astuple(self))
        return total

    def resident(self, interpreter: float) -> float:
        """Return the bytes of the process, including the interpreter and what is kept for the next step."""
        return self.total * (1 + KEPT) + interpreter


def bytes_of_rank(load: StageLoad, sharing: Sharing) -> RankBytes:
    """Return the bytes of a rank of a stage, given the ``load`` of an unshared FP32 model.

    All tensors count as evenly split over the tensor-parallel ranks, which is true for transformers except
    for norms.
    """
    width = 0.5 if sharing.half else 1.0
    whole = load.parameter_bytes / sharing.tensor
    kept = whole / sharing.sharded
    states = max(sharing.sharded, sharing.replicas if sharing.shard_optimizer else 1)
    return RankBytes(
        parameters=kept * width,
        gradients=kept * width,
        masters=2 * kept if sharing.half else 0.0,  # and the masters' gradients
        optimizer=whole * sharing.optimizer_bytes / states,
        activations=load.kept_bytes * width / sharing.tensor,
        new_gradients=load.new_gradient_bytes * width / sharing.tensor,
        buckets=whole * width if sharing.replicas > sharing.sharded == 1 else 0.0,
    )
