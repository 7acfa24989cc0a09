"""Functions inside torch's debug wrapper, on processes that have imported torch.distributed without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tests.support.patience import PATIENCE

__all__ = ["wrapped"]

One = TypeVar("One")


def wrapped(function: Callable[[], One]) -> One:
    """On every rank: what the function returns, whose groups the wrapper is around; there are none before."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # as importing torch.distributed does
    dist.init_process_group("smddp", timeout=timedelta(seconds=PATIENCE / 2))
    assert dist.group.WORLD is not None
    assert hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "wrapped_pg"), "the wrapper"
    return function()
