"""Private or closed parts of torch.distributed's groups that this package touches.

torch 2.13 reserves ``monitored_barrier`` for the backend named Gloo, and up to 2.14 ``split_group`` for
groups bound to an accelerator; later it names parts of a split after the number of a rank's groups, which may
differ between ranks. Neither has a hook, so both functions are replaced by ones that serve smddp's groups and
pass every other call on unchanged. Stores have their own file of this name, in ``stores``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from opensmd.collectives.stores.listening import LOOPBACK
from opensmd.native import core

__all__ = [
    "abort_with",
    "backends_of",
    "connections_of",
    "cpu_backend",
    "default_group",
    "default_store",
    "gloo_group",
    "gloo_options",
    "lost_ranks",
    "open_to_smddp",
    "pickle_objects_with",
    "shared_group",
    "timeout_of",
    "when_groups_are_made",
]

CONNECTIONS = 2  # between two members of Gloo: one per direction (native/csrc/torch/hosts/wire.hpp)


def open_to_smddp(name: str) -> None:
    """Make ``dist.monitored_barrier`` and ``dist.split_group`` accept groups whose backend is ``name``."""
    _replace("monitored_barrier", functools.partial(_monitored_barrier_wrapper, name))
    _replace("split_group", functools.partial(_split_group_wrapper, name))


def gloo_options(*, timeout: timedelta, one_network: bool) -> Any:
    """How a group of torch's Gloo connects; made without the other members.

    Any two have two connections over each interface. A message's tag says over which of them it goes: the
    remainder of a division by their number. Those of one interface are neighbours, so that each way has all
    interfaces.

    Args:
        timeout: for an operation.
        one_network: whether all share a loopback; Gloo then listens only there, unless GLOO_SOCKET_IFNAME
            names an interface.

    Raises:
        RuntimeError: this process cannot listen there.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device for device in _gloo_devices(one_network) for _ in range(CONNECTIONS)]
    options._threads = 2 * len(options._devices)  # as in torch itself
    return options


def gloo_group(store: Any, rank: int, size: int, options: Any) -> Any:
    """torch's Gloo, connected over ``store``.

    Args:
        store: used only by these members.
        rank: this process's position among them.
        size: the number of members.
        options: of :func:`gloo_options`.
    """
    before = _sockets()
    group = dist.ProcessGroupGloo(store, rank, size, options)
    for number in _sockets() - before:  # which other programs in or from this process would keep open
        with contextlib.suppress(OSError):  # of another thread, and closed meanwhile
            os.set_inheritable(number, False)
    return group


def _sockets() -> set[int]:
    """Return this process's descriptors of sockets; nothing where the system does not list them."""
    descriptors = set()
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.stat().st_mode):
                    descriptors.add(int(path.name))
    return descriptors


def connections_of(gloo: Any) -> int:
    """Return how many connections of torch's Gloo any two members have."""
    return len(gloo.options._devices)


def _gloo_devices(one_network: bool) -> list[Any]:
    """Create one device per interface that the user has named, as torch does, or else one."""
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return [gloo.create_device(interface=name) for name in interfaces.split(",")]
    return [gloo.create_device(hostname=LOOPBACK) if one_network else gloo.create_default_device()]


def pickle_objects_with(pickler: Any, unpickler: Any) -> None:
    """Make torch's object collectives use these instead of pickle's own."""
    c10d._pickler, c10d._unpickler = pickler, unpickler


def cpu_backend(group: dist.ProcessGroup | None) -> Any:
    """Return the backend for CPU tensors of ``group`` (None: the default group), unwrapped."""
    chosen = group or c10d._get_default_group()
    backend = chosen._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    return c10d._get_default_group()


def lost_ranks() -> dict[int, str]:
    """Return the ranks of this host that the default group has lost, and what became of them."""
    with contextlib.suppress(RuntimeError):  # no group yet, or none for CPU tensors
        backend = cpu_backend(default_group()) if dist.is_initialized() else None
        lost: dict[int, str] = getattr(backend, "lost_members", dict)()
        return {rank: what.replace("the group", "the default group") for rank, what in lost.items()}
    return {}


def abort_with(group: dist.ProcessGroup, reason: str) -> None:
    """End a group of smddp; whoever waits in it gets the reason. Others than smddp's stay as they are."""
    with contextlib.suppress(RuntimeError):  # none for CPU tensors, or its members are out of reach
        backend = cpu_backend(group)
        if hasattr(backend, "abort_with"):
            backend.abort_with(reason)


def default_store() -> Any:
    """Return the store through which the ranks of the default group met."""
    return c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a group's calls wait for its members; None if its backend does not say."""
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # not every backend has options
            options: Any = group._get_backend(device).options
            timeout: timedelta = options._timeout
            return timeout
    return None


def shared_group(group: dist.ProcessGroup | None) -> core.Group:
    """Return the core's shared-memory group behind ``group`` (None: the default group).

    Raises:
        RuntimeError: something else moves that group's data.
    """
    backend = cpu_backend(group)
    if not hasattr(backend, "shared_group"):
        raise RuntimeError(
            f"no shared memory serves this process group: its CPU backend is {backend.name()!r}. Give a "
            "group of the backend smddp whose ranks are all on one host"
        )
    core_group: core.Group = backend.shared_group
    return core_group


def backends_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return a group's backends by type of device, without torch's debugging wrappers."""
    backends = {}
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backends[device.type] = getattr(backend, "wrapped_pg", backend)
    return backends


def when_groups_are_made(act: Callable[[dist.ProcessGroup, list[int]], object]) -> None:
    """Call ``act`` with every new group of this process and its global ranks."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            group = result[0] if isinstance(result, tuple) else result
            if isinstance(group, dist.ProcessGroup):
                arguments = inspect.signature(original).bind(*args, **options).arguments
                act(group, _ranks_of(group, arguments.get("global_ranks_in_group")))
            return result

        return make

    internal: Any = c10d
    internal._new_process_group_helper = wrap(internal._new_process_group_helper)
    _replace("split_group", wrap)


def _ranks_of(group: dist.ProcessGroup, given: Sequence[int] | None) -> list[int]:
    """Return the global ranks of a group just created by torch; ``given`` if it does not know them yet."""
    if given is None:
        return c10d.get_process_group_ranks(group)
    return list(given) or list(range(group.size()))


def _replace(function: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(c10d, function)
    replacement = functools.wraps(original)(wrap(original))
    setattr(c10d, function, replacement)
    setattr(dist, function, replacement)


def _serves(name: str, group: Any) -> bool:
    return dist.is_initialized() and not c10d._rank_not_in_group(group) and dist.get_backend(group) == name


def _monitored_barrier_wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if not _serves(name, group):
            original(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = c10d._get_default_timeout(dist.get_backend(group))
        elif isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        chosen: Any = group or c10d._get_default_group()
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _split_group_wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        if not _serves(name, parent_pg):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
        if backend is not None and str(backend) != name:
            raise ValueError(
                f"split_group: the parent's backend is {name!r} for every device, got {backend!r}"
            )
        parent = parent_pg or c10d._get_default_group()
        timeout = timeout or c10d._get_default_timeout(dist.get_backend(parent))
        c10d._check_valid_timeout(timeout)
        return _split(parent, split_ranks, timeout, pg_options, group_desc)

    return split_group


def _split(
    parent: Any,
    split_ranks: list[list[int]] | None,
    timeout: timedelta,
    options: Any,
    description: str | None,
) -> Any:
    """Do torch's steps of split_group, without requiring that groups are bound to an accelerator."""
    own = _own_split(split_ranks, parent.rank(), parent.size())
    _splits[parent] = _splits.get(parent, 0) + 1
    if own is None:
        return c10d.GroupMember.NON_GROUP_MEMBER if _SPLITS_AS_NEW_GROUP else None
    to_global = {inside: outside for outside, inside in c10d._world.pg_group_ranks[parent].items()}
    # torch's own hashed names count this rank's groups, which may be more than another rank's.
    group_name = GroupName(f"{parent.group_name}:split:{_splits[parent]}:{'_'.join(map(str, own))}")
    group = parent.split_group(
        own, timeout=timeout, opts=options, group_name=group_name, group_desc=description
    )
    group.bound_device_id = c10d._get_default_group().bound_device_id
    backend = dist.get_backend(parent)
    c10d._register_pg_in_world(
        group,
        backend_name=backend,
        store=group.get_group_store(),
        group_name=group_name,
        backend_config=str(c10d.BackendConfig(backend)),
        rank_mapping={to_global[rank]: inside for inside, rank in enumerate(own)},
    )
    return group


# Since torch 2.14 split_group keeps the order of ranks and marks ranks in no part, both like new_group.
_SPLITS_AS_NEW_GROUP = hasattr(c10d, "_NonGroupMember")
# How often each group was split; all its ranks count alike, because all take part.
_splits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _own_split(split_ranks: list[list[int]] | None, rank: int, size: int) -> list[int] | None:
    """Return this rank's split, if any, in the order of torch's own split_group."""
    if not split_ranks:
        raise ValueError("split_group: split_ranks must be a list of lists of ranks, but is empty")
    seen: set[int] = set()
    for split in split_ranks:
        if (
            not split
            or len(set(split)) != len(split)
            or seen & set(split)
            or not set(split) <= set(range(size))
        ):
            raise ValueError(
                f"split_group: {split} in {split_ranks} is empty, repeats a rank or names one outside 0 to "
                f"{size - 1}"
            )
        seen |= set(split)
    own = next((split for split in split_ranks if rank in split), None)
    return own if own is None or _SPLITS_AS_NEW_GROUP else sorted(own)
