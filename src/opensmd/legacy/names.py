"""The constants of the old API: ``reduce_op`` and ``dist_backend``."""

from __future__ import annotations

import enum

__all__ = ["checked_operation", "dist_backend", "reduce_op"]


class reduce_op(enum.Enum):
    """The element-wise operations of ``all_reduce`` and ``reduce``."""

    SUM = "sum"
    PRODUCT = "product"
    MAX = "max"
    MIN = "min"


def checked_operation(op: object) -> reduce_op:
    """Return ``op`` if it is valid.

    Raises:
        ValueError: it is not a :class:`reduce_op`, but perhaps that of another package.
    """
    if not isinstance(op, reduce_op):
        raise ValueError(f"op={op!r}: expected reduce_op.SUM, PRODUCT, MAX or MIN")
    return op


class dist_backend(enum.IntEnum):
    """The backends, with the numbers they had."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3
