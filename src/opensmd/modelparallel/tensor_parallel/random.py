"""Random numbers for shared tensors (``smp.random``): equal on all ranks of a group, or different.

Dropout on common tensors must drop the same elements everywhere; on split ones (attention heads) it should
not. Both start from a number that every rank draws from its own generator, of which rank 0's counts. So only
the state of the default generators matters, and whatever saves and restores these (activation checkpointing,
checkpoints) need not know about any other.

Undistributed modules draw from the default generators. With ``prescaled_batch``, all ranks run them on the
same batch, and their results for distributed modules must be equal. So each step starts from the state of the
first rank's generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import is_tracing
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.side_effects.random_numbers.positions import generator_positions
from opensmd.modelparallel.runtime.side_effects.random_numbers.script_generators import GeneratorStates
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel.tensor_group import (
    tensor_process_group,
    tensor_rank,
    tensor_size,
)

__all__ = [
    "CommonDropout",
    "common",
    "follow_first_rank",
    "follow_script_of_first_rank",
    "generator_states",
    "manual_seed",
    "per_tensor_rank",
    "script_position",
]

RANGE = 1 << 48


def manual_seed(seed: int) -> None:
    """Seed torch so that the ranks of one replica draw alike, and replicas differently.

    Args:
        seed: the same on all ranks.
    """
    torch.manual_seed(seed + state.require("smp.random.manual_seed").groups.grid.coordinates(state.rank).data)


@contextlib.contextmanager
def common() -> Iterator[None]:
    """Make the ranks of a tensor-parallel group draw the same numbers inside; all of them must enter."""
    with _seeded(0):
        yield


@contextlib.contextmanager
def per_tensor_rank() -> Iterator[None]:
    """Make each rank of a tensor-parallel group draw different numbers inside; all of them must enter."""
    with _seeded(1 + tensor_rank()):
        yield


class CommonDropout(nn.Module):
    """Dropout for common tensors: it drops the same elements on all ranks.

    Args:
        p: the probability of an element being zeroed.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements of ``input``, in training."""
        if not self.training or self.p == 0.0:
            return input
        with common():
            return nn.functional.dropout(input, self.p)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


def generator_states() -> list[Tensor]:
    """Return the states of this rank's default generators."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _devices())]


def follow_first_rank() -> None:
    """Adopt the generator states of the tensor-parallel group's first rank; all ranks must call."""
    group = tensor_process_group()
    device = control_device(group)
    states = [own.to(device) for own in generator_states()]
    for generator_state in states:
        dist.broadcast(generator_state, group=group, group_src=0)
    torch.set_rng_state(states[0].cpu())
    for number, cuda_state in zip(_devices(), states[1:], strict=True):
        torch.cuda.set_rng_state(cuda_state.cpu(), number)


def script_position() -> int:
    """Where this rank's generators of Python and NumPy are, as a number."""
    return hash(tuple(position or (0, 0) for position in generator_positions()))


def follow_script_of_first_rank() -> None:
    """As :func:`follow_first_rank`, of Python's and NumPy's generators."""
    states = [GeneratorStates.now()]
    dist.broadcast_object_list(states, group=tensor_process_group(), group_src=0)
    states[0].put()


@contextlib.contextmanager
def _seeded(offset: int) -> Iterator[None]:
    """Draw from generators seeded by what rank 0 of the group drew, plus ``offset``."""
    if tensor_size() == 1 or is_tracing():
        yield
        return
    group = tensor_process_group()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    seed = torch.randint(RANGE, (1,), device="cpu").to(device)
    dist.broadcast(seed, group=group, group_src=0)
    with torch.random.fork_rng(_devices()):
        torch.manual_seed(int(seed) + offset)
        yield


def _devices() -> list[int]:
    """Return the CUDA device whose generator is in use, if any."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.current_device()] if used else []
