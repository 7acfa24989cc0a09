"""With ``prescaled_batch``, making ranks that share tensors start a step with the same batch and seed.

Different batches would mix in every shared module, and only wrong numbers would show it. So would different
dropout in earlier modules, which draw from each rank's own generators.
"""

from __future__ import annotations

from typing import Any

import torch

from opensmd.modelparallel._torch_internals import gathered_vectors
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.messages.step_inputs import fingerprint
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel.random import (
    follow_first_rank,
    follow_script_of_first_rank,
    generator_states,
    script_position,
)
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_process_group, tensor_size

__all__ = ["begin_alike"]


def begin_alike(args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> int:
    """Compare a step's arguments over the tensor-parallel group, and make it draw the same random numbers.

    All ranks of the group must call.

    Args:
        seed: what this rank's pipeline draws alike from.

    Returns:
        The seed of the first rank's pipeline.

    Raises:
        SMPError: on all of them, if the arguments differ.
    """
    if tensor_size() == 1 or not state.cfg.prescaled_batch:
        return seed
    group = tensor_process_group()
    # All in one collective, as this is the price of every step.
    data, drawn = fingerprint(structure.tensors_in((args, kwargs))), fingerprint(generator_states())
    numbers = [data, drawn, script_position(), seed]
    everyone = gathered_vectors(torch.tensor(numbers, device=control_device(group)), group).tolist()
    if len(set(everyone[::4])) > 1:
        raise SMPError(
            f"rank {state.rank}: the ranks of a tensor-parallel group called the step with different data. "
            "With prescaled_batch=True they need the same batch: shard data by smp.rdp_rank() of "
            "smp.rdp_size(). Set it to False to give each rank a batch of its own"
        )
    if len(set(everyone[1::4])) > 1:
        follow_first_rank()
    if len(set(everyone[2::4])) > 1:
        follow_script_of_first_rank()
    return int(everyone[3])
