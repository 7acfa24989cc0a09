"""Random numbers that a step draws with Python's ``random`` and NumPy.

Branches may depend on them (``if random.random() < self.teacher_forcing``), and all ranks must branch alike,
whatever the state of their own generators and the order of their microbatches. So the program draws the same
numbers on every rank. Modules that run as a whole on one rank draw from separate generators, because other
ranks do not know how many numbers they draw.

Swapping these generators at every turn takes longer than the turn itself, and hardly any model uses them. So
the first step in each mode finds out whether steps do.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from opensmd.modelparallel.runtime.side_effects.random_numbers.positions import generator_positions

__all__ = ["GeneratorStates", "ScriptRandom"]

Mode = tuple[bool, bool]  # training, and with gradients


class GeneratorStates(NamedTuple):
    """The states of Python's and NumPy's global generators."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GeneratorStates:
        """Return the current states; None for NumPy if it has not been imported."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False))

    def put(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def are_still(self) -> bool:
        """Whether nothing has been drawn since."""
        return random.getstate() == self.python and (
            self.numpy is None or _told(self.numpy) == _told(GeneratorStates.now().numpy)
        )


class ScriptRandom:
    """The generators of the microbatches, step after step.

    Args:
        rank: this rank in the pipeline.

    Attributes:
        swaps: whether the generators are swapped in this step.
    """

    def __init__(self, rank: int) -> None:
        self.swaps = False
        self._rank = rank
        self._quiet: set[Mode] = set()  # modes in which a step has drawn nothing

    def begin_step(self, mode: Mode, seed: int) -> None:
        """Start a step.

        Args:
            mode: the step's mode.
            seed: that of the step, the same on all ranks.
        """
        self.swaps = mode not in self._quiet
        self._mode, self._seed = mode, seed
        self._drawn = False
        if self.swaps:
            self._own = GeneratorStates.now()
        else:
            self._positions = generator_positions()
        self._common: dict[int, GeneratorStates] = {}
        self._inside: dict[int, GeneratorStates] = {}

    def begin(self, microbatch: int) -> None:
        """Start or resume a microbatch."""
        if self.swaps:
            self._begin(self._common, microbatch, self._seed, microbatch)

    def suspend(self, microbatch: int) -> None:
        """Suspend or end a microbatch."""
        if self.swaps:
            self._keep(self._common, microbatch)

    @contextlib.contextmanager
    def inside(self, microbatch: int) -> Iterator[None]:
        """Use the generators for modules that run as a whole on this rank."""
        if not self.swaps:
            yield
            return
        self._keep(self._common, microbatch)
        self._begin(self._inside, microbatch, self._seed, microbatch, self._rank)
        try:
            yield
        finally:
            self._keep(self._inside, microbatch)
            self._common[microbatch].put()

    def end_step(self) -> None:
        """Restore the rank's own generators."""
        if self.swaps:
            self._own.put()
            if not self._drawn:
                self._quiet.add(self._mode)
        elif generator_positions() != self._positions:
            self._quiet.discard(self._mode)

    def _begin(self, kept: dict[int, GeneratorStates], microbatch: int, *seed: int) -> None:
        if microbatch in kept:
            kept[microbatch].put()
            return
        # Of numbers alone, whose hash is the same in every process; texts would be hashed with a salt.
        number = hash(seed)
        random.seed(number)
        if self._own.numpy is not None:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
        kept[microbatch] = GeneratorStates.now()

    def _keep(self, kept: dict[int, GeneratorStates], microbatch: int) -> None:
        if microbatch in kept and not kept[microbatch].are_still():
            self._drawn = True
            kept[microbatch] = GeneratorStates.now()


def _told(state: dict[str, Any]) -> tuple[Any, ...]:
    """Convert a NumPy state to a comparable form."""
    generator = state["state"]
    return generator["key"].tobytes(), generator["pos"], state["has_gauss"], state["gauss"]
