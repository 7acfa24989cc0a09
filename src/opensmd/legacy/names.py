"""The constants of the old API: ``reduce_op`` and ``dist_backend``."""

from __future__ import annotations

import enum

__all__ = ["dist_backend", "reduce_op"]


class reduce_op(enum.Enum):
    """The element-wise operations of ``all_reduce`` and ``reduce``."""

    SUM = "sum"
    PRODUCT = "product"
    MAX = "max"
    MIN = "min"


class dist_backend(enum.IntEnum):
    """The backends, with the numbers they had."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3
