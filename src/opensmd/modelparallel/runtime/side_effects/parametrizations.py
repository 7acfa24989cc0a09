"""The cache of ``parametrize.cached()``, one per microbatch.

torch has one per process, which is filled by the first use of a weight and emptied when the region ends.
Microbatches take turns in such regions, and what one computes belongs to its own graph.
"""

from __future__ import annotations

from opensmd.modelparallel._torch_internals import (
    ParametrizationCache,
    parametrization_cache,
    put_parametrization_cache,
)

__all__ = ["CachesPerMicrobatch"]


class CachesPerMicrobatch:
    """The caches of one step's microbatches; each starts with the cache around the step."""

    def __init__(self) -> None:
        self._around = parametrization_cache()
        self._kept: dict[int, ParametrizationCache | None] = {}

    def begin(self, microbatch: int) -> None:
        """Start or resume a microbatch."""
        # Every turn comes here, and hardly any script has such regions. If none was suspended, none is open,
        # because a region ends with the function that opened it.
        if self._kept or self._around is not None:
            put_parametrization_cache(self._kept.get(microbatch, self._around))

    def suspend(self, microbatch: int) -> None:
        """Suspend a microbatch."""
        cache = parametrization_cache()
        if cache is not None or self._kept or self._around is not None:
            self._kept[microbatch] = cache

    def end(self, microbatch: int) -> None:
        """End a microbatch."""
        self._kept.pop(microbatch, None)

    def end_step(self) -> None:
        """Restore the cache around the step."""
        put_parametrization_cache(self._around)
