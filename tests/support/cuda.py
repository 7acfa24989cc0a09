"""Ranks with a GPU each, or with a share of the one there is.

Ranks that share one (``benchmarks.harness.gpus``) are slow, and everything else is as on many GPUs.

With ``OPENSMD_TEST_CUDA=mapped`` the programs run on the CPU instead, by the mapping of
``smdrun --device cpu``: that tries a test where there is no GPU, and says nothing about one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness import gpus

from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool

__all__ = ["DEVICE", "ENVIRONMENT", "MAPPED", "CudaRanks", "use_gpu"]

MAPPED = os.environ.get("OPENSMD_TEST_CUDA") == "mapped"
DEVICE = "cpu" if MAPPED else "cuda"  # of tensors that programs made on CUDA
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class CudaRanks:
    """A pool of ``world_size`` ranks, interpreters of their own: a process that has used CUDA cannot fork."""

    def __init__(self, world_size: int) -> None:
        self._pool = RankPool(world_size, env=ENVIRONMENT)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        backend: str | None = "smddp",
        timeout: float = PATIENCE / 4,
        group_timeout: float = PATIENCE / 8,
    ) -> list[Any]:
        """Run ``function(*args)`` on every rank, whose device is chosen; return the values by rank."""
        return self._pool.run(
            on_gpu, function, *args, backend=backend, timeout=timeout, group_timeout=group_timeout
        )

    def close(self) -> None:
        """End the ranks."""
        self._pool.close(kill=True)


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """What every rank runs."""
    use_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return function(*args)


def use_gpu(rank: int, world_size: int) -> None:
    """Give a rank its device, before its first call of CUDA."""
    if MAPPED:
        from opensmd.launch.mapped_cuda import cuda_on_cpu
        from tests.support import nccl_like

        cuda_on_cpu.install()
        nccl_like.install()
        return
    gpus.use_gpu(rank, world_size)
