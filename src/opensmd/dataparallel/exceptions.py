"""Errors of the v1 interface, with the names that launchers look for in logs."""

__all__ = ["SMDDPError", "SMDDPGroupError", "SMDDPNotInitializedError"]


class SMDDPError(RuntimeError):
    """Base class of the data-parallel library's own errors."""


class SMDDPNotInitializedError(SMDDPError):
    """Something was used before ``init_process_group()``."""


class SMDDPGroupError(SMDDPError, ValueError):
    """A group other than ``group.WORLD`` was given to the v1 interface."""
