"""Random numbers of microbatches, independent of the order in which they take turns.

Operations on replicated tensors draw the same numbers on every rank. What runs on one rank draws from its
default generators, whose state is separate for every microbatch. Both follow from the state of torch's own
generator before the step, so torch.manual_seed makes a step repeatable.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch

__all__ = ["RandomPerMicrobatch", "ReplicatedRandom", "default_generators", "seed_of_step"]


class ReplicatedRandom:
    """One generator per microbatch, seeded by the step and the microbatch.

    Args:
        generators: those of the devices in use.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._seed = 0
        self._states: dict[int, list[torch.Tensor]] = {}

    def begin_step(self, seed: int) -> None:
        """Seed the generators anew; ``seed`` is the same on every rank of the pipeline."""
        self._seed = seed
        self._states.clear()

    @contextlib.contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Draw from the microbatch's generator inside, and from the rank's own again afterwards."""
        own = _states(self._generators)
        states = self._states.get(microbatch)
        if states is None:
            # Only of numbers, whose hash is the same in every process; strings are hashed with a salt.
            seed = hash((self._seed, microbatch)) & ((1 << 63) - 1)
            for generator in self._generators:
                generator.manual_seed(seed)
        else:
            _set_states(self._generators, states)
        try:
            yield
        finally:
            self._states[microbatch] = _states(self._generators)
            _set_states(self._generators, own)


class RandomPerMicrobatch:
    """The states of this rank's default generators for the microbatches of one step.

    Args:
        generators: those of the devices in use.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._seed = int(torch.randint(1 << 62, (), device="cpu"))
        # After the draw, so that the next step gets another seed.
        self._rank = _states(generators)
        self._states: dict[int, list[torch.Tensor]] = {}

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """Start a microbatch, or its deferred backward."""
        # A deferred backward has its own seed: when it runs depends on messages, and the forward's last state
        # is gone by then.
        for generator in self._generators:
            generator.manual_seed((self._seed + 2 * microbatch + backward) & ((1 << 63) - 1))

    def suspend(self, microbatch: int) -> None:
        """Suspend a microbatch."""
        self._states[microbatch] = _states(self._generators)

    def resume(self, microbatch: int) -> None:
        """Resume a microbatch."""
        _set_states(self._generators, self._states[microbatch])

    def end_step(self) -> None:
        """Restore the rank's own state."""
        _set_states(self._generators, self._rank)


def seed_of_step() -> int:
    """Return a number that follows from the state of torch's own generator, which every step changes."""
    return zlib.crc32(torch.default_generator.get_state().numpy().data)


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the CPU's generator and that of an accelerator."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
