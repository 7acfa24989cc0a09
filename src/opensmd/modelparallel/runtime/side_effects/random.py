"""Random numbers of microbatches, whatever the order in which they take turns.

Operations on replicated tensors draw the same numbers on every rank. What runs on one rank draws from that
rank's default generators, of which every microbatch has its own state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

__all__ = ["OwnRandom", "ReplicatedRandom"]


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


class OwnRandom:
    """The states of this rank's default generators for the microbatches of one step.

    Args:
        generators: of the devices in use.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._seed = int(torch.randint(1 << 62, ()))
        self._rank = self._now()
        self._states: dict[int, list[torch.Tensor]] = {}

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """A microbatch begins, or a backward that it has deferred."""
        for generator in self._generators:
            generator.manual_seed((self._seed + 2 * microbatch + backward) & ((1 << 63) - 1))

    def suspend(self, microbatch: int) -> None:
        """It lets others go on."""
        self._states[microbatch] = self._now()

    def resume(self, microbatch: int) -> None:
        """It goes on after others have."""
        self._set(self._states[microbatch])

    def end_step(self) -> None:
        """The rank's own state again."""
        self._set(self._rank)

    def _now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's generator, and that of an accelerator."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
