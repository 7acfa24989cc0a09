"""A word to scripts whose optimizer has parameters in whose places the model has got others.

Distributed modules and sharding put parameters of their own into a model. ``smp.DistributedOptimizer`` knows
of that; an optimizer that was made before, and is not wrapped, would step and train nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.wrapped import WrappedOptimizer
from opensmd.optim.param_groups import params_of

__all__ = ["LeftBehind", "require_trained"]


class LeftBehind:
    """Parameters that a module had and its successor has not.

    Args:
        module: before anything is replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gone = {id(parameter): weakref.ref(parameter) for parameter in module.parameters()}

    def leave_out(self, module: nn.Module) -> None:
        """Those of the successor have not been replaced."""
        for parameter in module.parameters():
            self._gone.pop(id(parameter), None)

    def __contains__(self, parameter: object) -> bool:
        reference = self._gone.get(id(parameter))
        return reference is not None and reference() is parameter


def require_trained(optimizer: torch.optim.Optimizer, is_replaced: Callable[[nn.Parameter], bool]) -> None:
    """Refuse the step of a plain optimizer with replaced parameters, none of which has a gradient.

    Where they have gradients, the script trains the module that was replaced by itself.

    Raises:
        SMPError: the optimizer has such parameters, and gets no gradients.
    """
    if isinstance(optimizer, WrappedOptimizer):
        return
    parameters = params_of(optimizer.param_groups)
    gone = [parameter for parameter in parameters if is_replaced(parameter)]
    if gone and all(parameter.grad is None for parameter in gone):
        raise SMPError(
            f"optimizer.step: {len(gone)} of the {len(parameters)} parameters of this "
            f"{type(optimizer).__name__} get no gradients: the model has others in their places since it "
            "was distributed or sharded. Make the optimizer of model.parameters() after "
            "smp.DistributedModel, and give it to smp.DistributedOptimizer"
        )
