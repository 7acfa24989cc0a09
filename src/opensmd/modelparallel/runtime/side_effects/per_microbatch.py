"""What every microbatch has to itself although they take turns: random numbers and module attributes."""

from __future__ import annotations

from opensmd.modelparallel.runtime.side_effects.attributes import AttributesPerMicrobatch
from opensmd.modelparallel.runtime.side_effects.parametrizations import CachesPerMicrobatch
from opensmd.modelparallel.runtime.side_effects.random_numbers.script_generators import ScriptRandom
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import RandomPerMicrobatch

__all__ = ["PerMicrobatchState"]


class PerMicrobatchState:
    """Swaps state in and out at every turn.

    Args:
        random: the rank's generators.
        script_random: Python's and NumPy's.
        attributes: the modules'.
    """

    def __init__(
        self, random: RandomPerMicrobatch, script_random: ScriptRandom, attributes: AttributesPerMicrobatch
    ) -> None:
        self._random = random
        self._script_random = script_random
        self._attributes = attributes
        self._caches = CachesPerMicrobatch()

    @property
    def watches_first(self) -> bool:
        """Whether the first microbatch is to complete its forward before others begin."""
        return self._attributes.watches_first

    def watch_first(self) -> None:
        """Note what the first microbatch would show to others if it were suspended here."""
        self._attributes.watch_first()

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """Start a microbatch, or its deferred backward."""
        self._random.begin(microbatch, backward=backward)
        self._script_random.begin(microbatch)
        self._caches.begin(microbatch)
        self._attributes.begin(microbatch)

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """Suspend a microbatch for others; ``through``: whether its forward is complete."""
        self._random.suspend(microbatch)
        self._script_random.suspend(microbatch)
        self._caches.suspend(microbatch)
        self._attributes.suspend(microbatch, through=through)

    def resume(self, microbatch: int) -> None:
        """Resume a microbatch after others have run."""
        self._random.resume(microbatch)
        self._script_random.begin(microbatch)
        self._caches.begin(microbatch)
        self._attributes.begin(microbatch)

    def end(self, microbatch: int, *, backward_left: bool) -> None:
        """End a microbatch's function, or the backward that it has deferred."""
        self._script_random.suspend(microbatch)
        # It continues later, so its state is kept although the forward is complete.
        if backward_left:
            self._caches.suspend(microbatch)
            self._attributes.suspend(microbatch, through=True)
        else:
            self._caches.end(microbatch)
            self._attributes.end(microbatch)

    def end_step(self) -> None:
        """Restore the rank's own state."""
        self._random.end_step()
        self._script_random.end_step()
        self._caches.end_step()
        self._attributes.end_step()
