"""The cache of ``parametrize.cached()``: one for each microbatch.

torch has one for the whole process, which is filled by the first use of a weight and emptied where the region
ends. Microbatches take turns in such regions, and what one has computed has its graph.
"""

from __future__ import annotations

from opensmd.modelparallel._torch_internals import (
    ParametrizationCache,
    parametrization_cache,
    put_parametrization_cache,
)

__all__ = ["CachesPerMicrobatch"]


class CachesPerMicrobatch:
    """The caches of the microbatches of one step; each begins with what there is around the step."""

    def __init__(self) -> None:
        self._around = parametrization_cache()
        self._kept: dict[int, ParametrizationCache | None] = {}

    def begin(self, microbatch: int) -> None:
        """A microbatch begins, or goes on after others have."""
        # Every turn passes here, and hardly any script has such regions: one that nobody has suspended in is
        # closed, as a region ends with the function that has opened it.
        if self._kept or self._around is not None:
            put_parametrization_cache(self._kept.get(microbatch, self._around))

    def suspend(self, microbatch: int) -> None:
        """A microbatch lets others go on."""
        cache = parametrization_cache()
        if cache is not None or self._kept or self._around is not None:
            self._kept[microbatch] = cache

    def end(self, microbatch: int) -> None:
        """A microbatch has ended."""
        self._kept.pop(microbatch, None)

    def end_step(self) -> None:
        """Put the cache back that there was around the step."""
        put_parametrization_cache(self._around)
