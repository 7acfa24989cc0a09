"""Making ranks that share tensors start the same step; with ``prescaled_batch``, with one batch and seed.

Different steps or batches would mix in every shared module, and only wrong numbers would show it. So would
different dropout in earlier modules, which draw from each rank's own generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opensmd.modelparallel.communicate import meet_sharing_tensors
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.meeting import meet
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.messages.step_inputs import fingerprint, program
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


def begin_alike(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> int:
    """Require that the tensor-parallel ranks call the same step; with ``prescaled_batch``, begin it alike.

    All ranks of the group must call. Then the step has the same arguments and draws the same random numbers.

    Args:
        function: the step's.
        seed: what this rank's pipeline draws alike from.

    Returns:
        The seed of the first rank's pipeline.

    Raises:
        SMPError: on all of them, if the functions or the arguments differ.
    """
    if tensor_size() == 1:
        return seed
    if not state.cfg.prescaled_batch:
        meet_sharing_tensors(program(function))
        return seed
    group = tensor_process_group()
    # All in one collective, as this is the price of every step.
    data, drawn = fingerprint(structure.tensors_in((args, kwargs))), fingerprint(generator_states())
    numbers = (data, drawn, script_position(), seed)
    of_ranks = meet(program(function), group, control_device(group), numbers)
    batches, states, positions, _ = map(set, zip(*of_ranks, strict=True))
    if len(batches) > 1:
        raise SMPError(
            f"rank {state.rank}: the ranks of a tensor-parallel group called the step with different data. "
            "With prescaled_batch=True they need the same batch: shard data by smp.rdp_rank() of "
            "smp.rdp_size(). Set it to False to give each rank a batch of its own"
        )
    if len(states) > 1:
        follow_first_rank()
    if len(positions) > 1:
        follow_script_of_first_rank()
    return of_ranks[0][3]
