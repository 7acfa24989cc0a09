"""What a module says that runs as a whole and finds a tensor whose data is on another rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.side_effects.objects.places import Reached
from opensmd.modelparallel.runtime.side_effects.objects.reach import path_to, shown
from opensmd.modelparallel.runtime.tensors.placeholder import DataElsewhere
from opensmd.modelparallel.runtime.tensors.tags import tag_of

__all__ = ["found_elsewhere"]


def found_elsewhere(
    error: DataElsewhere, name: str, rank: int, owner: nn.Module | None, arguments: Any
) -> SMPUnsupportedError:
    """Return the error that says where the tensor was.

    Args:
        error: what the operation on it has raised.
        name: what runs, on pipeline rank ``rank``.
        owner: the module that runs, if it is one.
        arguments: its args and kwargs.
    """
    # Only here, where time no longer matters, is it searched for.
    tensor, tag = error.tensor, tag_of(error.tensor)
    home = "another one" if tag is None else f"pipeline rank {tag.home}"
    return SMPUnsupportedError(
        f"{name} on pipeline rank {rank} has found a tensor of shape {tuple(tensor.shape)} in "
        f"{_place_of(tensor, owner, arguments)}, whose data is on {home}. Pass it to the module as an "
        "argument (alone, or in a list, tuple, dict or dataclass), or place the module that makes it and all "
        "that use it on one partition with smp.set_partition"
    )


def _place_of(tensor: Tensor, owner: nn.Module | None, arguments: Any) -> str:
    args, kwargs = arguments
    for key, argument in (*enumerate(args), *kwargs.items()):
        path = path_to(tensor, argument)
        if path is not None:
            return f"{shown(*path)!r} of its argument {key!r}"
    place = Reached(owner).find(tensor) if isinstance(owner, nn.Module) else None
    return place or "a place that is no argument, attribute or global"
