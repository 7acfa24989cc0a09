"""Errors of the data-parallel library."""

from opensmd.dataparallel.exceptions import SMDDPError, SMDDPGroupError, SMDDPNotInitializedError

__all__ = ["SMDDPError", "SMDDPGroupError", "SMDDPNotInitializedError"]
