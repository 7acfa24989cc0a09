"""Names that one script imports for debugging; they say that they do not exist here when they are called."""

from opensmd.modelparallel.compatibility.later_versions import dump_model, verify

__all__ = ["dump_model", "verify"]
