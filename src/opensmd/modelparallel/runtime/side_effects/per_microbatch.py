"""What every microbatch has to itself although they take turns: random numbers and attributes of modules."""

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

    def begin(self, microbatch: int, *, backward: bool) -> None:
        """A microbatch begins, or a backward that it has deferred."""
        self._random.begin(microbatch, backward=backward)
        self._script_random.begin(microbatch)
        self._caches.begin(microbatch)
        self._attributes.begin(microbatch)

    def suspend(self, microbatch: int, *, through: bool) -> None:
        """A microbatch lets others go on; ``through`` its forward or not."""
        self._random.suspend(microbatch)
        self._script_random.suspend(microbatch)
        self._caches.suspend(microbatch)
        self._attributes.suspend(microbatch, through=through)

    def resume(self, microbatch: int) -> None:
        """A microbatch goes on after others have."""
        self._random.resume(microbatch)
        self._script_random.begin(microbatch)
        self._caches.begin(microbatch)
        self._attributes.begin(microbatch)

    def end(self, microbatch: int, *, backward_left: bool) -> None:
        """A microbatch's function has returned, or also the backward that it has deferred."""
        self._script_random.suspend(microbatch)
        # It goes on later: what it has put there is kept for that, though its forward is over.
        if backward_left:
            self._caches.suspend(microbatch)
            self._attributes.suspend(microbatch, through=True)
        else:
            self._caches.end(microbatch)
            self._attributes.end(microbatch)

    def end_step(self) -> None:
        """Give the rank its own state back."""
        self._random.end_step()
        self._script_random.end_step()
        self._caches.end_step()
        self._attributes.end_step()
