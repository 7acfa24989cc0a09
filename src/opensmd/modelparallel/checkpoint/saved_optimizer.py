"""What saving and resuming need from the optimizer that ``smp.DistributedOptimizer`` returned.

A protocol, because methods of a base class would override those of the script's own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["SavedOptimizer"]


class SavedOptimizer(Protocol):
    """An optimizer whose state is spread over ranks."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state."""

    def state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the whole state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state or, on all ranks, parts of one."""

    def _smp_fitting(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank would load, if it fits."""

    def _smp_names(self) -> list[str]:
        """Return the model's names of all parameters, in the whole optimizer's order."""

    def _smp_names_of_groups(self) -> list[list[str]]:
        """Return the module's names of all parameters, group by group."""
