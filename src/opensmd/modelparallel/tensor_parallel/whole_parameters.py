"""Checking for optimizers that need whole parameters, of which tensor-parallel ranks only have slices."""

from __future__ import annotations

import warnings

import torch

from opensmd.modelparallel.state import state
from opensmd.script_level import script_level

__all__ = ["require_slices_suffice"]

# Each element's update depends on the matrix's rows and columns, or all of it.
_OF_MATRICES = ("Adafactor", "Muon")


def require_slices_suffice(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs the norms of whole parameters.

    Raises:
        ValueError: LAMB or NovoGrad.

    Warns:
        UserWarning: one that trains slices differently from the whole.
    """
    if state.cfg.tensor_parallel_degree == 1:
        return
    name = type(optimizer).__name__
    if hasattr(optimizer, "norm_group"):
        raise ValueError(
            f"smp.DistributedOptimizer: {name} needs the norms of whole parameters, "
            "but tensor-parallel ranks have only slices; use one that treats each element by itself, such "
            "as Adam or SGD"
        )
    if name in _OF_MATRICES:
        warnings.warn(
            f"smp.DistributedOptimizer: {name} looks at matrices as a whole, but tensor-parallel ranks have "
            "only slices of those of distributed modules, and each trains its own: not as in one process. "
            "For the same results use an optimizer that treats each element by itself, such as AdamW",
            stacklevel=script_level(),
        )
