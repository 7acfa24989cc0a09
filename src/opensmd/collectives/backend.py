"""Registering "smddp" with torch.distributed, which then lets this package create groups of that name.

One c10d::Backend serves a group: CPU tensors through shared memory on one host and through torch's Gloo
between hosts, CUDA tensors through torch's NCCL; ``making`` shows how it is created. Settings come only from
:mod:`opensmd.environment.settings`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from opensmd.collectives import _torch_internals
from opensmd.collectives.making.group import make_group
from opensmd.collectives.making.membership import Membership
from opensmd.collectives.name import DEVICES, NAME
from opensmd.collectives.recording.begin import record_all_groups
from opensmd.collectives.sealed import seal_objects_of_torch
from opensmd.collectives.stores._torch_internals import (
    let_scripts_choose_the_rendezvous,
    listen_where_asked,
    rendezvous_address,
)
from opensmd.collectives.stores.place import require_place
from opensmd.environment.ignored import warn_of_ignored

__all__ = ["NAME", "create", "register"]


@cache
def register() -> None:
    """Make "smddp" a backend of torch.distributed. Calling it again changes nothing."""
    # DDP asks a backend for the memory of its buckets only if this is "0"; a user's own value is kept.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    warn_of_ignored(os.environ)
    setattr(dist.Backend, NAME.upper(), NAME)  # torch looks it up, which would come here again
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))
    seal_objects_of_torch()
    record_all_groups()
    _torch_internals.open_to_smddp(NAME)
    listen_where_asked()
    # smdrun says where its store is; under torchrun, a script hardly changes it before its imports
    at = os.environ.get("SMDRUN_STORE") or rendezvous_address()
    let_scripts_choose_the_rendezvous(at)


def create(torch_options: Any, own_options: Any = None) -> Any:
    """Create a group's backend; torch calls this for every group with backend "smddp"."""
    size, rank = torch_options.group_size, torch_options.group_rank
    require_place(rank, size)
    ranks = torch_options.global_ranks_in_group or range(size)
    if own_options is not None and not isinstance(own_options, Backend.Options):
        raise TypeError(f"smddp: pg_options must be options of a backend, got {own_options!r}")
    timeout = own_options._timeout if own_options is not None else torch_options.timeout
    if timeout <= timedelta(0):
        raise ValueError(
            f"smddp: the timeout of a group must be longer than 0 s, got {timeout.total_seconds():g} s"
        )
    place = Membership(torch_options.store, rank, tuple(ranks), timeout, torch_options.group_id)
    return make_group(place)
