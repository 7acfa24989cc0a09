"""Parameters that come into a model after its parts have been placed: no rank would know whose they are.

A head that is replaced between steps, or an adapter that is added, would be computed where its input happens
to be and trained by whichever rank; with replicas nobody would average its gradients. So a step looks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["PlacedParameters"]

_parameters, _children, _values = attrgetter("_parameters"), attrgetter("_modules"), methodcaller("values")


class PlacedParameters:
    """The parameters of a model at the time when it was placed.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._remember()

    def require_no_others(self) -> None:
        """Look at every module; quick where nothing has changed.

        Raises:
            SMPError: a parameter has been added or replaced.
        """
        # By identity, and without a line of Python for each module; names are asked for only if something
        # moved.
        if self._sizes() != self._seen_sizes or not all(map(is_, self._held(), self._seen)):
            self._look_again()

    def _look_again(self) -> None:
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in self._known:
                raise SMPError(
                    f"parameter {name!r} was added to the model after the first step, which placed all "
                    "of its parts: no rank would train it. Change the model before the first step; to keep "
                    "what has been trained, save it, and load it into the changed model when the script "
                    "runs again"
                )
        self._remember()

    def _remember(self) -> None:
        # The objects are kept with their ids, which could otherwise be given to new ones.
        self._known = {id(each): each for each in self._module.parameters()}
        self._modules = list(self._module.modules())
        self._seen_sizes, self._seen = self._sizes(), list(self._held())

    def _sizes(self) -> list[int]:
        return list(map(len, self._holders()))

    def _held(self) -> Iterator[Any]:
        return chain.from_iterable(map(_values, self._holders()))

    def _holders(self) -> Iterator[Mapping[str, Any]]:
        """What modules have their parameters and children in, each by name."""
        return chain(map(_parameters, self._modules), map(_children, self._modules))
