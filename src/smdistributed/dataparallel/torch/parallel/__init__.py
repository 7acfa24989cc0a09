"""One of the two import paths of the v1 DistributedDataParallel."""

from opensmd.dataparallel.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
