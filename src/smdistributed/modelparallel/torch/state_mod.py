"""The one object that ``smp.init`` fills."""

from opensmd.modelparallel.state import state

__all__ = ["state"]
