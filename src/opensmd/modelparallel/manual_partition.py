"""Places given by hand: ``smp.partition`` for modules being created, ``smp.set_partition`` for existing ones.

A module's place is noted on the module itself. ``smp.partition`` sees modules because ``nn.Module.__init__``
is wrapped while at least one context is open, and restored when the last one closes.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opensmd.modelparallel.state import state

__all__ = ["fixed_places", "partition", "set_partition"]

CREATED = "_smp_created_in_partition"
ASSIGNED = "_smp_assigned_partition"


class _Open:
    """The contexts that are open in each thread, and torch's own constructor meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.original: Callable[..., None] | None = None
        self.stack = threading.local()

    @property
    def places(self) -> list[int]:
        if not hasattr(self.stack, "places"):
            self.stack.places = []
        places: list[int] = self.stack.places
        return places


_open = _Open()


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Place all modules created inside on partition ``index``; the innermost context wins.

    Modules that are created outside all contexts go to ``default_partition``. With ``auto_partition`` the
    contexts are ignored.

    Raises:
        ValueError: there is no such partition.
    """
    _check(index, "smp.partition")
    _open.places.append(index)
    _watch()
    try:
        yield
    finally:
        _unwatch()
        _open.places.pop()


def set_partition(module: nn.Module, index: int) -> None:
    """Place an existing module, and everything below it that has no place of its own, on a partition.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: there is no such partition, or the model has been partitioned already.
    """
    _check(index, "smp.set_partition")
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_partition: expected a torch.nn.Module, got {module!r}")
    if state.model is not None and state.model.partitioned:
        raise ValueError(
            "smp.set_partition: the model has been partitioned already; place before the first step"
        )
    module.__dict__[ASSIGNED] = index


def fixed_places(module: nn.Module) -> dict[str, int]:
    """The places given by hand for modules of ``module``, by name.

    With ``auto_partition`` only those of ``smp.set_partition`` count. Otherwise a module that was created
    outside every context but sits below one with a place gets ``default_partition``, as documented.

    Warns:
        UserWarning: ``smp.partition`` was used although ``auto_partition`` is True.
    """
    assigned = {
        name: int(each.__dict__[ASSIGNED])
        for name, each in module.named_modules(remove_duplicate=False)
        if ASSIGNED in each.__dict__
    }
    created = {
        name: int(each.__dict__[CREATED])
        for name, each in module.named_modules(remove_duplicate=False)
        if CREATED in each.__dict__
    }
    if state.cfg.auto_partition:
        if created:
            warnings.warn(
                "smp.partition contexts are ignored because auto_partition is True; set it to False, with a "
                "default_partition, to place modules by hand",
                stacklevel=2,
            )
        return assigned
    places: dict[str, int] = {}
    for name, _ in module.named_modules(remove_duplicate=False):
        inherited = _nearest(name, assigned)
        if inherited is not None:
            places[name] = inherited
        else:
            places[name] = created.get(name, state.cfg.default_partition)
    return places


def _nearest(name: str, given: dict[str, int]) -> int | None:
    """The place of the module itself or of the nearest module around it."""
    while True:
        if name in given:
            return given[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def _check(index: int, name: str) -> None:
    partitions = state.require(name).cfg.pipeline_parallel_degree
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name}: index={index!r} must be an int")
    if not 0 <= index < partitions:
        raise ValueError(f"{name}: index={index} is not a partition; there are {partitions}, numbered from 0")


def _watch() -> None:
    with _open.lock:
        _open.count += 1
        if _open.count > 1:
            return
        original = _open.original = nn.Module.__init__

        def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if _open.places:
                self.__dict__[CREATED] = _open.places[-1]

        nn.Module.__init__ = noting  # type: ignore[method-assign]


def _unwatch() -> None:
    with _open.lock:
        _open.count -= 1
        if _open.count == 0:
            assert _open.original is not None
            nn.Module.__init__ = _open.original  # type: ignore[method-assign]
            _open.original = None
