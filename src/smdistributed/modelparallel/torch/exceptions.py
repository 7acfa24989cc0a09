"""The errors of model parallelism."""

from opensmd.modelparallel.exceptions import (
    SMPCheckpointError,
    SMPError,
    SMPNotInitializedError,
    SMPUnsupportedError,
)

__all__ = ["SMPCheckpointError", "SMPError", "SMPNotInitializedError", "SMPUnsupportedError"]
