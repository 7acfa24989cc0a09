"""Tracking where a run of a model is, by hooks of its modules, and how long each unit takes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import nn

from opensmd.modelparallel._torch_internals import in_transform, takes_hooks
from opensmd.modelparallel.planning.plan import is_inside
from opensmd.modelparallel.redirection._torch_internals import replaced_calls

__all__ = ["Clock", "Moment", "Position", "UnitSeconds", "Timepiece"]


class UnitSeconds(NamedTuple):
    """Seconds by unit.

    ``backward`` is None if only forwards were timed; ``with_sums`` says whether it includes the cost of
    starting gradient accumulations.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float] | None
    with_sums: bool = False


Moment = TypeVar("Moment")


class Timepiece(Protocol[Moment]):
    """Tells moments, and what has passed between them."""

    def now(self) -> Moment:
        """Return the moment."""
        ...

    def seconds(self, since: Moment, until: Moment) -> float:
        """Return the seconds from one moment to another."""
        ...


class Position:
    """Which unit the run is in; :mod:`opensmd.modelparallel.planning.trace` explains units."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.entered: list[str] = []  # the outermost module entered, by unit
        self.current = -1
        self.calls: dict[str, int] = defaultdict(int)
        self.guests: set[tuple[str, str]] = set()  # a module, and one from elsewhere that was called in it
        self.whole: set[str] = set()  # modules that call others where a cut is impossible
        self._unit_of: dict[str, int] = {}
        self._fresh = False

    def enter(self, module: str) -> None:
        """Note that ``module`` is being called."""
        self.guests.update((frame, module) for frame in self.stack if not is_inside(module, frame))
        if self.stack and in_transform():
            self.whole.add(self.stack[-1])
        self.stack.append(module)
        self.calls[module] += 1
        if module in self._unit_of:
            self.current, self._fresh = self._unit_of[module], False
            return
        if not self._fresh:
            self.current, self._fresh = len(self.entered), True
            self.entered.append(module)
        self._unit_of[module] = self.current

    def leave(self) -> None:
        """Note that the innermost call returned or raised."""
        self.stack.pop()
        self._fresh = False

    @contextlib.contextmanager
    def follow(
        self,
        names: dict[nn.Module, str],
        entered: Callable[[nn.Module, Any], None] | None = None,
        returned: Callable[[nn.Module, Any, Any], None] | None = None,
    ) -> Iterator[None]:
        """Keep this position up to date while modules of ``names`` are called.

        ``entered`` is called with the module and its arguments when a call starts, and ``returned`` with the
        result, too, when it ends.
        """

        def before(module: nn.Module, args: Any) -> None:
            self.enter(names[module])
            if entered is not None:
                entered(module, args)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            if returned is not None:
                returned(module, args, out)
            self.leave()

        def around(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                before(module, args)
                out = None
                try:
                    out = forward(*args, **kwargs)
                    return out
                finally:
                    after(module, args, out)

            return call

        handles = []
        scripted: dict[nn.Module, Callable[..., Any]] = {}
        for module in names:
            if not takes_hooks(module):
                scripted[module] = around(module, module.forward)
                continue
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        try:
            with replaced_calls(scripted, {}):
                yield
        finally:
            for handle in handles:
                handle.remove()


class Clock(Position, Generic[Moment]):
    """Measures the forward seconds of each unit in a real run.

    Attributes:
        watch: measures them.
    """

    def __init__(self, watch: Timepiece[Moment]) -> None:
        super().__init__()
        self.watch = watch
        self._stretches: list[tuple[int, Moment, Moment]] = []  # units, and from when to when they ran
        self._since = watch.now()

    @property
    def seconds(self) -> dict[int, float]:
        """Forward seconds by unit."""
        return self._sums(self._stretches)

    def _sums(self, stretches: Iterable[tuple[int, Moment, Moment]]) -> dict[int, float]:
        sums: dict[int, float] = defaultdict(float)
        for unit, since, until in stretches:
            sums[unit] += self.watch.seconds(since, until)
        return sums

    def _tick(self) -> None:
        now = self.watch.now()
        if self.current >= 0:
            self._stretches.append((self.current, self._since, now))
        self._since = now

    def enter(self, module: str) -> None:
        self._tick()
        super().enter(module)
