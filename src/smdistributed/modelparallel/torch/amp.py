"""Mixed precision: a GradScaler for partitioned models."""

from opensmd.modelparallel.amp import GradScaler

__all__ = ["GradScaler"]
