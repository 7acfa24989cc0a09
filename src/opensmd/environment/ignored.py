"""Variables that tuned the original libraries and have no effect here: one warning names all that are set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from opensmd.environment.variables import current_launch

__all__ = ["ignored", "warn_of_ignored"]

_NAMES = (
    "SMP_D2D_GPU_BUFFER_SIZE_BYTES",
    "SMP_DISABLE_D2D",
    "SMP_ENABLE_CROSS_NODE_D2D",
    "SMP_NCCL_THROTTLE_LIMIT",
)
_PREFIX = "SMDDP_AG_"


def ignored(environ: Mapping[str, str]) -> list[str]:
    """Return the names in ``environ`` that tuned the original libraries, sorted."""
    return sorted(name for name in environ if name in _NAMES or name.startswith(_PREFIX))


def warn_of_ignored(environ: Mapping[str, str]) -> None:
    """Warn about them on rank 0.

    Warns:
        UserWarning: some variables are set and have no effect.
    """
    names = ignored(environ)
    if not names:
        return
    launch = current_launch(environ)
    if launch is None or launch.rank == 0:
        warnings.warn(
            "these variables tuned the original libraries and have no effect here: "
            f"{', '.join(names)}. Unset them",
            UserWarning,
            stacklevel=3,
        )
