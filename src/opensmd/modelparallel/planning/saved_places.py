"""Where the parts of a partial checkpoint belong, so that the plan of the job that loads it can be the same.

The planner may decide by measured times, which are not the same in the next job. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["saved_places"]


def saved_places(names_by_stage: Sequence[Collection[str]]) -> dict[str, int]:
    """Return the stage of every module whose own parameters and buffers come from one stage alone.

    Args:
        names_by_stage: the names in each stage's partial state dict. Several may have a buffer of a split
            module.
    """
    stages: dict[str, set[int]] = {}
    for stage, names in enumerate(names_by_stage):
        for name in names:
            stages.setdefault(name.rpartition(".")[0], set()).add(stage)
    return {module: min(holders) for module, holders in stages.items() if len(holders) == 1}
