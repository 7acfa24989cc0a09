"""DeepSpeed's all-reduce through shared memory, compiled from its package at the first run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness.rank import Rank

__all__ = ["deepspeed_all_reduce", "remove_buffers"]


def deepspeed_all_reduce(me: Rank) -> Callable[[torch.Tensor], object] | None:
    """DeepSpeed's operator, which adds up in place; None where the package is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    # its buffers are named after the user, address and port, and it wants to know that all ranks are here
    os.environ |= {"LOCAL_SIZE": str(me.size), "MASTER_ADDR": "localhost", "MASTER_PORT": me.folder.name}
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if me.rank == 0:
        ShareMemCommBuilder().load(verbose=False)  # compiles it once
    me.meeting.wait(patiently=True)
    operator = ShareMemCommBuilder().load(verbose=False)
    operator.initialize(me.size, me.rank)
    return torch.ops.deepspeed.inference_all_reduce_


def remove_buffers(me: Rank) -> None:
    """Take this job's buffers out of shared memory, where DeepSpeed leaves them."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{me.folder.name}_{me.rank}"):
        buffer.unlink()
