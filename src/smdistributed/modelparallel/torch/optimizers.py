"""Stand-ins for apex's fused optimizers."""

from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad

FusedLamb = FusedLAMB  # the spelling of some published examples

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
