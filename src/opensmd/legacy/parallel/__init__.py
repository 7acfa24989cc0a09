"""``torch.nn.parallel.deprecated``: models on several processes over ``torch.distributed.deprecated``.

Begin with ``distributed``. Imports ``legacy``, and from ``collectives`` what joins tensors.
"""

from opensmd.legacy.parallel.distributed import DistributedDataParallel
from opensmd.legacy.parallel.distributed_cpu import DistributedDataParallelCPU

__all__ = ["DistributedDataParallel", "DistributedDataParallelCPU"]
