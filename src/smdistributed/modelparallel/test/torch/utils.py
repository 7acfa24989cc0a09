"""Names that one script imports for debugging; calling them raises an error that says they are missing."""

from opensmd.modelparallel.compatibility.later_versions import dump_model, verify

__all__ = ["dump_model", "verify"]
