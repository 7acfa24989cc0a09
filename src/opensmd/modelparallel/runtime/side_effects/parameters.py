"""Temporary replacements of parameters, as by ``torch.func.functional_call``.

In plain PyTorch, one microbatch has finished and restored the parameters before the next one starts. Here
microbatches take turns within such a call: each sees its own replacements, or else the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.slots import ABSENT
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["ParametersPerMicrobatch", "ReplacedParameters", "with_other_parameters"]


class _Place(NamedTuple):
    """A module's slot for a parameter."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Any:
        return self.module._parameters.get(self.name, ABSENT)

    def holds_another(self, home: int) -> bool:
        """Whether it holds a tensor with a home that is not a parameter of rank ``home``."""
        tag = None if self.value is None else tag_of(self.value)
        return tag is not None and not (tag.home == home and isinstance(self.value, nn.Parameter))

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.module._parameters.pop(self.name, None)
        else:
            self.module._parameters[self.name] = value


@dataclass(frozen=True)
class _WithParameters:
    """A module's function that takes replacements of parameters before its own arguments."""

    function: Callable[..., Any]
    places: Sequence[_Place]

    def __call__(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        before = [place.value for place in self.places]
        for place, tensor in zip(self.places, tensors, strict=True):
            place.put(tensor)
        try:
            return self.function(*args, **kwargs)
        finally:
            for place, value in zip(self.places, before, strict=True):
                place.put(value)


def with_other_parameters(
    module: nn.Module, home: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a version of ``function`` that also takes the replacements of parameters, and its arguments.

    As arguments, these tensors come from wherever they are, and gradients go back there.

    Args:
        module: the function's module.
        home: the rank that runs it.
    """
    places = [
        place
        for each in module.modules()
        for place in (_Place(each, name) for name in each._parameters)
        if place.holds_another(home)
    ]
    if not places:
        return function, args
    return _WithParameters(function, places), (tuple(place.value for place in places), *args)


class ReplacedParameters:
    """Which parameters of a model steps are known to replace temporarily.

    Args:
        modules: the model's.
    """

    def __init__(self, modules: Collection[nn.Module] = ()) -> None:
        # A scripted module keeps its own, which cannot be replaced.
        self.modules = [module for module in modules if isinstance(module._parameters, dict)]
        self.places: list[_Place] = []


class ParametersPerMicrobatch:
    """The parameters that the microbatches of one step see.

    Args:
        replaced: those that earlier steps have replaced.
    """

    def __init__(self, replaced: ReplacedParameters) -> None:
        self._replaced = replaced
        # This visits every module in every step, and most have no parameters of their own.
        self._initial = {
            module: module._parameters.copy() if module._parameters else {} for module in replaced.modules
        }
        self._values: dict[_Place, dict[int, Any]] = {place: {} for place in replaced.places}

    def __bool__(self) -> bool:
        return bool(self._values)

    def begin(self, microbatch: int) -> None:
        """Start or resume a microbatch."""
        for place, values in self._values.items():
            place.put(values.get(microbatch, self._before(place)))

    def suspend(self, microbatch: int, *, look: bool) -> None:
        """Suspend a microbatch; ``look``: search for parameters that were never replaced before."""
        if look:
            self._look()
        for place, values in self._values.items():
            values[microbatch] = place.value

    def end(self, microbatch: int) -> None:
        """End a suspended microbatch; what is still replaced, the script has replaced for good."""
        for place, values in self._values.items():
            value = values.pop(microbatch)
            if value is not self._before(place):
                self._initial[place.module][place.name] = value

    def end_step(self) -> None:
        """Restore the parameters."""
        for place in self._values:
            place.put(self._before(place))

    def _look(self) -> None:
        for module, initial in self._initial.items():
            now = module._parameters
            for name in now if now.keys() == initial.keys() else {**now, **initial}:
                place = _Place(module, name)
                if now.get(name, ABSENT) is not self._before(place) and place not in self._values:
                    self._replaced.places.append(place)
                    self._values[place] = {}

    def _before(self, place: _Place) -> Any:
        return self._initial[place.module].get(place.name, ABSENT)
