"""Other tensors in the place of parameters for a while, as ``torch.func.functional_call`` puts them there.

Plain PyTorch is done with one microbatch, and has put the parameters back, before the next one looks. Here
microbatches take turns within such a call: each finds what it has itself put there, or else the parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from opensmd.modelparallel.runtime.side_effects.slots import ABSENT

__all__ = ["ParametersPerMicrobatch", "ReplacedParameters"]


class _Place(NamedTuple):
    """Where a module keeps a parameter."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Any:
        return self.module._parameters.get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.module._parameters.pop(self.name, None)
        else:
            self.module._parameters[self.name] = value


class ReplacedParameters:
    """Which parameters of a model steps replace for a while, as far as is known.

    Args:
        modules: of the model.
    """

    def __init__(self, modules: Collection[nn.Module] = ()) -> None:
        # A scripted module keeps its own, which nobody replaces.
        self.modules = [module for module in modules if isinstance(module._parameters, dict)]
        self.places: list[_Place] = []


class ParametersPerMicrobatch:
    """The parameters that the microbatches of one step find.

    Args:
        replaced: those that earlier steps have replaced.
    """

    def __init__(self, replaced: ReplacedParameters) -> None:
        self._replaced = replaced
        # Every module in every step, and most have no parameters of their own.
        self._initial = {
            module: module._parameters.copy() if module._parameters else {} for module in replaced.modules
        }
        self._values: dict[_Place, dict[int, Any]] = {place: {} for place in replaced.places}

    def __bool__(self) -> bool:
        return bool(self._values)

    def begin(self, microbatch: int) -> None:
        """A microbatch begins, or goes on after others have."""
        for place, values in self._values.items():
            place.put(values.get(microbatch, self._before(place)))

    def suspend(self, microbatch: int, *, look: bool) -> None:
        """A microbatch lets others go on; ``look`` for parameters that were never replaced before."""
        if look:
            self._look()
        for place, values in self._values.items():
            values[microbatch] = place.value

    def end(self, microbatch: int) -> None:
        """A suspended microbatch has ended: what is still replaced, the script has replaced for good."""
        for place, values in self._values.items():
            value = values.pop(microbatch)
            if value is not self._before(place):
                self._initial[place.module][place.name] = value

    def end_step(self) -> None:
        """Leave the parameters."""
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
