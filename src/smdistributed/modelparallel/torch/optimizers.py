"""Stand-ins for apex's fused optimizers."""

from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad

FusedLamb = FusedLAMB  # the seed's spelling

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
