"""``torch.nn.parallel.deprecated``: models on several processes over ``torch.distributed.deprecated``."""

from opensmd.legacy.parallel.cpu import DistributedDataParallelCPU
from opensmd.legacy.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "DistributedDataParallelCPU"]
