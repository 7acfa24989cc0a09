"""Begins to record a process's collectives when its first group is made, if a timeline is wanted at all.

Groups of torch's own backends are known by then as well: whoever makes a group, torch asks one function for
it. Without a timeline nothing here runs, and nothing of torch is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.collectives.name import NAME
from opensmd.collectives.recording.flight_records import FlightRecords
from opensmd.collectives.recording.logged_calls import logged_calls
from opensmd.environment.settings import Settings
from opensmd.native import build
from opensmd.said_once import warn_once
from opensmd.timeline.recorder import VARIABLE, Recorder, recorder

__all__ = ["record_all_groups", "record_operations"]


@functools.cache
def record_all_groups() -> None:
    """Record what this process does, from its first group on; if a timeline is wanted, and once."""
    if os.environ.get(VARIABLE):
        _torch_internals.when_groups_are_made(_record_group)


@functools.cache
def record_operations(rank: int) -> None:
    """Begin to record what this process, ``rank`` of the job, does; if a timeline is wanted, and once."""
    wanted = recorder(rank)
    if wanted is not None:
        wanted.add_source(FlightRecords(rank))
        _log_calls(wanted)
        _torch_internals.before_groups_end(wanted.drain)


def _log_calls(to: Recorder) -> None:
    core = _core()
    if core is not None:
        core.log_calls()
        to.add_source(logged_calls)


def _record_group(group: Any) -> None:
    """Record a group that torch has just made, ``smddp``'s own as well as others."""
    record_operations(dist.get_rank() if dist.is_initialized() else group.rank())
    served = _torch_internals.backends_of(group)
    others = {device: backend for device, backend in served.items() if backend.name() != NAME}
    if not others:
        return
    core = _core()
    if core is None:
        warn_once(
            f"{VARIABLE} is set, but what torch's own backends do is recorded by the compiled core alone, "
            "and there is none here: the timeline will not show it. `smd doctor` says why.",
            RuntimeWarning,
        )
        return
    for device, backend in others.items():
        if device == "cpu":
            core.log_calls_of_torch()
        else:
            # made for other devices than NVIDIA's, or with a hook of the user's own
            with contextlib.suppress(RuntimeError, ValueError):
                core.log_device_calls(backend, group.group_name)


def _core() -> Any:
    """The compiled core; None where there is none, which the group that is being made explains."""
    settings = Settings.from_environment()
    try:
        return build.load(settings) if settings.native and settings.build_error is None else None
    except build.BuildError:
        return None
