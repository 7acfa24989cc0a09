"""One DeprecationWarning per name of the v1 interface, saying what to use instead."""

from __future__ import annotations

import os
import warnings

__all__ = ["warn_deprecated"]

_warned: set[str] = set()


def warn_deprecated(name: str, replacement: str, *, stacklevel: int = 3) -> None:
    """Warn once that ``name`` is deprecated since 1.4.0, only on rank 0 if the rank is known.

    ``stacklevel`` counts from here: 3 is the caller of the function that calls this.
    """
    if name in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(name)
    warnings.warn(
        f"{name} is deprecated since 1.4.0: use {replacement}, with "
        "torch.distributed.init_process_group(backend='smddp')",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
