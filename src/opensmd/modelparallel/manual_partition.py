"""Places given by hand: ``smp.partition`` for modules being created, ``smp.set_partition`` for existing ones.

A module's place is noted on the module itself.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn

from opensmd.modelparallel.compatibility.created_modules import CreationMark
from opensmd.modelparallel.planning.plan import nearest
from opensmd.modelparallel.state import state
from opensmd.script_level import script_level

__all__ = ["fixed_places", "partition", "set_partition"]

_CREATED = CreationMark("_smp_created_in_partition")
ASSIGNED = "_smp_assigned_partition"


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Place all modules created in this context on partition ``index``; the innermost context wins.

    Modules that are created outside all contexts go to ``default_partition``. With ``auto_partition``, the
    contexts are ignored.

    Raises:
        ValueError: there is no such partition.
    """
    _check(index, "smp.partition")
    with _CREATED.put(index):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Place an existing module, and its submodules without a place of their own, on a partition.

    Args:
        module: a part of the model, or the model, before the first step.
        index: the partition, from 0.

    Raises:
        TypeError: ``module`` is not a module.
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
    """Return the places given by hand to modules of ``module``, by name.

    With ``auto_partition``, only those of ``smp.set_partition`` count. Otherwise a module that was created
    outside every context, but is part of one with a place, gets ``default_partition``, as documented.

    Warns:
        UserWarning: ``smp.partition`` was used although ``auto_partition`` is True.
    """
    assigned = {
        name: int(submodule.__dict__[ASSIGNED])
        for name, submodule in module.named_modules(remove_duplicate=False)
        if ASSIGNED in submodule.__dict__
    }
    created = {
        name: int(submodule.__dict__[_CREATED.attribute])
        for name, submodule in module.named_modules(remove_duplicate=False)
        if _CREATED.attribute in submodule.__dict__
    }
    if state.cfg.auto_partition:
        if created:
            warnings.warn(
                "smp.partition contexts are ignored because auto_partition is True; set it to False, with a "
                "default_partition, to place modules by hand",
                stacklevel=script_level(),
            )
        return assigned
    places: dict[str, int] = {}
    for name, _ in module.named_modules(remove_duplicate=False):
        holder = nearest(name, assigned)
        if holder is not None:
            places[name] = assigned[holder]
        else:
            places[name] = created.get(name, state.cfg.default_partition)
    return places


def _check(index: int, name: str) -> None:
    partitions = state.require(name).cfg.pipeline_parallel_degree
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name}: index={index!r} must be an int")
    if not 0 <= index < partitions:
        raise ValueError(f"{name}: index={index} is not a partition; there are {partitions}, numbered from 0")
