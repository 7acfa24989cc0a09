"""Small helpers that example scripts import from here."""

from opensmd.modelparallel.tensor_parallel.distribution_axis import get_distribution_axis
from opensmd.modelparallel.world import rank_message as rmsg

__all__ = ["get_distribution_axis", "rmsg"]
