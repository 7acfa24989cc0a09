"""The errors of model parallelism; all are RuntimeErrors, so that scripts need not know them."""

from __future__ import annotations

__all__ = [
    "PeerCheckpointError",
    "PeerFailed",
    "SMPCheckpointError",
    "SMPError",
    "SMPNotInitializedError",
    "SMPUnsupportedError",
]


class SMPError(RuntimeError):
    """Anything that went wrong in model parallelism."""


class SMPNotInitializedError(SMPError):
    """Something was used before ``smp.init``."""


class SMPUnsupportedError(SMPError):
    """A feature of later versions of the library that does not exist here."""


class SMPCheckpointError(SMPError):
    """A checkpoint that is damaged, not one of ours, or does not fit the model."""


class PeerFailed(SMPError):
    """Another rank of the pipeline has reported a failure; look there for the cause."""


class PeerCheckpointError(SMPCheckpointError, PeerFailed):
    """Another rank could not write or read its part of a checkpoint."""
