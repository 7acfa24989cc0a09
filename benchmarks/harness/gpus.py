"""Which GPU a rank uses, also where there are fewer GPUs than ranks.

NCCL refuses two ranks of one host on one device, and knows hosts by their identity, which NCCL_HOSTID
replaces: ranks that say they are on different hosts may share a device, and talk over sockets of the
loopback.
"""

from __future__ import annotations

import os

import torch

__all__ = ["use_gpu"]


def use_gpu(rank: int, world_size: int) -> None:
    """Give a rank its device, before its first call of CUDA."""
    devices = torch.cuda.device_count()
    if world_size > devices:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % devices)
