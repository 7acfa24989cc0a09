"""The wrapper of a partitioned model."""

from opensmd.modelparallel.model import DistributedModel

__all__ = ["DistributedModel"]
