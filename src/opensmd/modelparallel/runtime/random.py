"""Random numbers that are the same on every rank: for operations on replicated tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ReplicatedRandom"]


class ReplicatedRandom:
    """One generator for each microbatch, seeded by the step and the microbatch.

    Args:
        seed: the same on every rank of the pipeline.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._states: dict[int, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Seed anew."""
        self._step += 1
        self._states.clear()

    @contextlib.contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Draw from the microbatch's generator inside, from the rank's own again afterwards."""
        own = torch.get_rng_state()
        state = self._states.get(microbatch)
        if state is None:
            seed = hash((self._seed, self._step, microbatch)) & ((1 << 63) - 1)
            state = torch.Generator().manual_seed(seed).get_state()
        torch.set_rng_state(state)
        try:
            yield
        finally:
            self._states[microbatch] = torch.get_rng_state()
            torch.set_rng_state(own)
