"""Tensors that a model keeps in attributes of its modules, from one part of a microbatch for another.

The losses of a mixture of experts on its routers, a weight that a hook makes before each call: plain PyTorch
is done with one microbatch before the next one writes there. Here they take turns. So each finds what it has
itself put there last, or else what the nearest one before it has.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.tags import tags_of

__all__ = ["OwnAttributes", "Places"]

Place = tuple[nn.Module, str]

_OTHERS = frozenset({*nn.Module().__dict__, "forward", "_compiled_call_impl"})
_ABSENT = object()
_BEFORE = -1  # all microbatches of the step


class Places:
    """Where the modules of a model keep tensors, beside parameters and buffers, that change during steps.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.modules: dict[nn.Module, str] = {}
        if module is not None:
            self.modules = {each: name for name, each in module.named_modules()}
        self.found: list[Place] = []
        self.calls = -1  # so many had been new up to the end of the latest step


class OwnAttributes:
    """The attributes of the microbatches of one step.

    Args:
        places: where they are, as far as earlier steps know.
        context: what the microbatches have in common.
        alone: there is one microbatch, and nothing to do.
    """

    def __init__(self, places: Places, context: PipelineContext, *, alone: bool) -> None:
        self._places = places
        self._context = context
        self._modules: Collection[nn.Module] = () if alone else places.modules
        self._initial = {module: dict(module.__dict__) for module in self._modules}
        self._values: dict[Place, dict[int, Any]] = {}  # by the microbatch that has put them there
        self._ended: set[int] = set()
        self._first = 0  # of those that have not ended
        for place in () if alone else places.found:
            self._add(place)

    def begin(self, microbatch: int) -> None:
        """A microbatch begins, or goes on after others have."""
        for place, values in self._values.items():
            _put(place, _nearest(values, microbatch))

    def suspend(self, microbatch: int) -> None:
        """It lets others go on.

        Raises:
            SMPError: it has put something new where a later one has already used what it had put before.
        """
        if self._modules and self._context.new_calls != self._places.calls:
            self._look()
        for place, values in self._values.items():
            value = _get(place)
            if value is not _nearest(values, microbatch):
                self._require_not_borrowed(place, microbatch, values.get(microbatch))
                values[microbatch] = value

    def end(self, microbatch: int) -> None:
        """It has ended; see :meth:`suspend`."""
        self.suspend(microbatch)
        self._ended.add(microbatch)
        while self._first in self._ended:
            self._first += 1
        for values in self._values.values():
            self._forget(values)

    def end_step(self) -> None:
        """Leave what the last microbatch has put there."""
        self._places.calls = self._context.new_calls
        for place, values in self._values.items():
            _put(place, values[max(values)])

    def _look(self) -> None:
        """Find further places."""
        for module in self._modules:
            initial = self._initial[module]
            for name, value in module.__dict__.items():
                place = (module, name)
                if name in _OTHERS or place in self._values or value is initial.get(name, _ABSENT):
                    continue
                if _keeps_tensors(value):
                    self._places.found.append(place)
                    self._add(place)

    def _add(self, place: Place) -> None:
        module, name = place
        self._values[place] = {_BEFORE: self._initial[module].pop(name, _ABSENT)}

    def _forget(self, values: dict[int, Any]) -> None:
        """Of what was put before the first microbatch that has not ended, all but the last."""
        for number in sorted([number for number in values if number < self._first])[:-1]:
            del values[number]

    def _require_not_borrowed(self, place: Place, microbatch: int, value: Any) -> None:
        if self._context.borrowed.isdisjoint(tags_of(_tensors(value))):
            return
        module, attribute = place
        name = f"{self._places.modules[module]}.{attribute}".lstrip(".")
        raise SMPError(
            f"microbatch {microbatch} has set {name!r} again after a later microbatch had used what it had "
            "set before. Microbatches take turns, but the later one should have found the new value: keep "
            "nothing in attributes for the next microbatch, or set active_microbatches to 1"
        )


def _nearest(values: dict[int, Any], microbatch: int) -> Any:
    """What a microbatch finds: its own, or that of the nearest one before."""
    if microbatch in values:
        return values[microbatch]
    return values[max([number for number in values if number < microbatch])]


def _get(place: Place) -> Any:
    module, name = place
    return module.__dict__.get(name, _ABSENT)


def _put(place: Place, value: Any) -> None:
    module, name = place
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _keeps_tensors(value: Any) -> bool:
    """Whether there are tensors in it, or may soon be; ranks are told of other values, too (``effects``)."""
    return bool(_tensors(value)) or (isinstance(value, (list, dict)) and not value)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    structure.collect(value, found)
    return found
