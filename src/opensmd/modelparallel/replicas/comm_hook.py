"""Communication hooks of scripts, which average over microbatches themselves.

SageMaker's library leaves both averages to them, over replicas and over microbatches. Hooks of torch know
nothing of microbatches. Here a bucket already has the mean over these when its hook is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CommHook", "averaging_hook"]

CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]  # (state, bucket) -> the reduced bucket
_AVERAGING_OVER_REPLICAS_ONLY = ("torch.distributed.", "opensmd.")


def averaging_hook(hook: CommHook, microbatches: int) -> CommHook:
    """Return a hook that gives a script's ``hook`` sums over microbatches; or torch's or ours as it is."""
    if microbatches == 1 or str(getattr(hook, "__module__", "")).startswith(_AVERAGING_OVER_REPLICAS_ONLY):
        return hook

    @functools.wraps(hook)  # torch reads a hook's name and annotations
    def with_sums(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        bucket.buffer().mul_(microbatches)
        return hook(state, bucket)

    return with_sums
