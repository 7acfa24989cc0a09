"""Ranks that do not call the same with CUDA tensors hear of it in time."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.cuda import DEVICE, ENVIRONMENT, MAPPED, on_gpu
from tests.support.ranks import run_once

# the mapping leaves no second device
pytestmark = pytest.mark.skipif(MAPPED, reason="needs tensors of two devices")


def different_devices() -> list[str]:
    """A sum of CUDA tensors on one rank and of CPU tensors on the other: before NCCL connects, and after.

    Before, all ranks get an error. Afterwards it is torch that waits on the rank with the CUDA tensor, and
    ends the process after the timeout.
    """
    rank, said = dist.get_rank(), []
    apart = dist.new_group(timeout=timedelta(seconds=3))
    try:
        dist.all_reduce(torch.ones(2, device=DEVICE if rank == 0 else "cpu"), group=apart)
    except dist.DistBackendError as error:
        said.append(str(error))
    together = dist.new_group(timeout=timedelta(seconds=5))
    dist.all_reduce(torch.ones(2, device=DEVICE), group=together)
    torch.cuda.synchronize()
    if rank == 1:
        try:
            dist.all_reduce(torch.ones(2), group=together)
        except dist.DistBackendError as error:
            said.append(str(error))
        return said
    if (
        len(said) != 1
        or "rank 1 did not join within 3 s (the first collective of CUDA tensors" not in said[0]
    ):
        return said
    tensor = torch.ones(2, device=DEVICE)
    dist.all_reduce(tensor, group=together)
    return [str(tensor.tolist())]


def test_tensors_of_different_devices_on_two_ranks_end_with_an_error() -> None:
    environment = {**ENVIRONMENT, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}  # which takes longer than to notice
    first, second = run_once(2, on_gpu, different_devices, env=environment, timeout=75, group_timeout=60)
    assert second.kind == "value", second.text
    before, after = second.value
    assert "rank 0" in before and "rank 0" in after
    assert first.kind in ("died", "error"), f"{first.value}\n{first.text}"
