"""The errors of model parallelism, under the name that launchers look up."""

from opensmd.modelparallel.exceptions import SMPError, SMPNotInitializedError

__all__ = ["SMPError", "SMPNotInitializedError"]
