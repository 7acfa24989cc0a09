"""Starting to record a process's calls when its first group is created, if a timeline is wanted.

This includes groups of torch's own backends, because torch creates all groups through one function. Without a
timeline, nothing here runs and nothing in torch is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.collectives.name import NAME
from opensmd.collectives.recording.core_events import CoreEvents
from opensmd.environment.settings import Settings
from opensmd.native.availability import core_or_reason
from opensmd.said_once import warn_once
from opensmd.timeline.recorder import VARIABLE, Recorder, recorder

if TYPE_CHECKING:
    from opensmd.native.core import SmddpBackend

__all__ = ["record_all_groups", "record_devices", "record_smddp"]


@functools.cache
def record_all_groups() -> None:
    """Record what this process does from its first group on, if a timeline is wanted; called once."""
    if os.environ.get(VARIABLE):
        _torch_internals.when_groups_are_made(_record_group)


def record_smddp(backend: SmddpBackend, name: str, rank: int, ranks: Sequence[int]) -> None:
    """Record what a new backend does for CPU tensors, if a timeline is wanted.

    Args:
        backend: one of the core's.
        name: the group's name.
        rank: this process's rank in the job.
        ranks: those of the group, in its order.
    """
    events = _events(rank)
    if events is not None:
        backend.record_as(events.add_group(name, ranks))


def record_devices(backend: Any, name: str, rank: int, ranks: Sequence[int]) -> None:
    """Record what torch's NCCL does in a group, like :func:`record_smddp`."""
    core, events = _core(), _events(rank)
    if core is None or events is None:
        return
    # made for non-NVIDIA devices, or with a hook of the user's own
    with contextlib.suppress(RuntimeError, ValueError):
        core.record_device_calls(backend, events.add_group(f"{name}/cuda", ranks))


def _record_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Record a group that torch has just created, if torch's own backends serve it."""
    served = _torch_internals.backends_of(group)
    others = {device: backend for device, backend in served.items() if backend.name() != NAME}
    if not others:
        return
    rank = dist.get_rank() if dist.is_initialized() else group.rank()
    core, events = _core(), _events(rank)
    if core is None or events is None:
        warn_once(
            f"{VARIABLE} is set, but what torch's own backends do is recorded by the compiled core alone, "
            "and there is none here: the timeline will not show it. `smd doctor` says why.",
            RuntimeWarning,
        )
        return
    for device, backend in others.items():
        if device == "cpu":
            events.add_group(group.group_name, ranks)
            core.record_calls_of_torch()
        else:
            record_devices(backend, group.group_name, rank, ranks)


def _events(rank: int) -> CoreEvents | None:
    """Return the core's events of this process, ``rank`` of the job; None without a timeline or a core."""
    wanted = recorder(rank)
    return None if wanted is None else _handed_to(wanted)


@functools.cache
def _handed_to(wanted: Recorder) -> CoreEvents | None:
    core = _core()
    if core is None:
        return None
    events = CoreEvents(core, wanted.alarm)
    wanted.add_source(events)
    return events


def _core() -> ModuleType | None:
    return core_or_reason(Settings.from_environment())[0]
