"""Mixed precision: a GradScaler for partitioned models."""

from opensmd.modelparallel.precision.grad_scaler import GradScaler

__all__ = ["GradScaler"]
