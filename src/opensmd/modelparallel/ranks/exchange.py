"""Telling all ranks of a group what each of them has, as objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["exchange"]


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of ``group``, by default of all ranks; all of them must call."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
