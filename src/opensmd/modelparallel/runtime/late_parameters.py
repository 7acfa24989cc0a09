"""Refusing parameters that enter a model after it has been placed, or move to the names of others.

A head that is replaced between steps, or an added adapter, would be computed where its input happens to be
and trained by any rank; with replicas, its gradients would not be averaged. Layers that move to the names of
others would be saved from ranks that do not have them. So every step checks first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["PlacedParameters"]


class PlacedParameters:
    """The parameters of a model when it was placed.

    Args:
        module: the user's module.
        home_of: returns the pipeline rank on which the parameter of a name lives, by the plan.
    """

    def __init__(self, module: nn.Module, home_of: Callable[[str], int]) -> None:
        self._module = module
        self.home_of = home_of
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._remember()

    def require_no_others(self) -> None:
        """Check every module; fast if nothing has changed.

        Raises:
            SMPError: a parameter has been added or replaced, or has moved to the name of one elsewhere.
        """
        # Comparing modules' contents by identity takes microseconds; names are looked up only if something
        # moved.
        for module, parameters, children in self._seen:
            if not (_same(module._parameters, parameters) and _same(module._modules, children)):
                self._look_again()
                return

    def _look_again(self) -> None:
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in self._known and not self._is_frozen_like_before(name, parameter):
                raise SMPError(
                    f"parameter {name!r} was added to the model after the first step, which placed all "
                    "of its parts: no rank would train it. Change the model before the first step; to keep "
                    "what has been trained, save it, and load it into the changed model when the script "
                    "runs again"
                )
            placed_as = self._names.get(id(parameter), name)
            if self.home_of(placed_as) != self.home_of(name):
                raise SMPError(
                    f"parameter {placed_as!r} was moved to {name!r} after the first step, which placed it on "
                    f"pipeline rank {self.home_of(placed_as)}, and what has that name on "
                    f"{self.home_of(name)}: state dicts would look for it there. Leave modules under their "
                    "names (to skip layers, let forward skip them), or change the model before the first step"
                )
        self._remember()

    def _is_frozen_like_before(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it is in the place of another that nobody trains either.

        PEFT sets quantized weights anew in each forward of DoRA on a CPU.
        """
        before = self._frozen.get(name)
        return not parameter.requires_grad and before == (parameter.shape, parameter.dtype)

    def _remember(self) -> None:
        self._frozen = {
            name: (parameter.shape, parameter.dtype)
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad
        }
        # The objects are kept with their ids, which new ones could otherwise get.
        self._known = {id(parameter): parameter for parameter in self._module.parameters()}
        self._seen = [
            (module, tuple(module._parameters.values()), tuple(module._modules.values()))
            for module in self._module.modules()
        ]


def _same(now: Mapping[str, Any], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now.values(), before))
