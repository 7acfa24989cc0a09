"""Offloading the inputs of torch's own activation checkpoints, which transformers' models use."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from opensmd.modelparallel.offloading._torch_internals import saving_inputs
from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.runtime.calls.interception import current_run

__all__ = ["offloading_of_all_checkpoints"]


def offloading_of_all_checkpoints(offloading: Offloading | None) -> contextlib.AbstractContextManager[None]:
    """Offload what torch's own checkpoints keep.

    Args:
        offloading: where to keep inputs; None changes nothing.
    """
    if offloading is None:
        return contextlib.nullcontext()

    def around(inputs: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        # In glue, every module that is called inside a checkpoint is checkpointed separately.
        if current_run() is not None:
            return contextlib.nullcontext()
        return offloading.of_inputs(inputs)

    return saving_inputs(around)
