"""The other import path of the v1 DistributedDataParallel."""

from opensmd.dataparallel.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
