"""CUDA tensors in a group of smddp: torch's NCCL serves them, beside CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.cuda import DEVICE, CudaRanks

Gpus = Callable[[int], CudaRanks]


def sums_on_both_devices() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for device in (DEVICE, "cpu", DEVICE):
        tensor = torch.full((5,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        assert tensor.device.type == device
        assert tensor.tolist() == [size * (size + 1) / 2] * 5


def test_one_group_sums_tensors_of_both_devices(gpus: Gpus) -> None:
    gpus(2).run(sums_on_both_devices)
