"""Small helpers that example scripts import from here."""

from opensmd.modelparallel.compatibility.parameter_layout import get_distribution_axis
from opensmd.modelparallel.compatibility.parameter_layout import rank_message as rmsg

__all__ = ["get_distribution_axis", "rmsg"]
