"""With ``prescaled_batch`` the ranks that share tensors are given the same batch: a check that it is so.

Different ones would mix in every shared module, and nothing but the numbers would tell.
"""

from __future__ import annotations

from typing import Any

import torch

from opensmd.modelparallel._torch_internals import gathered
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.messages.step_inputs import fingerprint
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_process_group, tensor_size

__all__ = ["require_same_batch"]


def require_same_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare a step's arguments over the tensor-parallel group; called on all of it.

    Raises:
        SMPError: on all of them, if they differ.
    """
    if tensor_size() == 1 or not state.cfg.prescaled_batch:
        return
    group = tensor_process_group()
    mine = torch.tensor([fingerprint(structure.tensors_in((args, kwargs)))], device=control_device(group))
    if len(set(gathered(mine, group).tolist())) > 1:
        raise SMPError(
            f"rank {state.rank}: the ranks of a tensor-parallel group called the step with different data. "
            "With prescaled_batch=True they need the same batch: shard data by smp.rdp_rank() of "
            "smp.rdp_size(). Set it to False to give each rank a batch of its own"
        )
