"""The one place where this package touches private or closed parts of torch.distributed.

torch 2.13 reserves ``monitored_barrier`` for Gloo by the backend's name, and up to 2.14 ``split_group``
for groups bound to an accelerator; later it names parts of a split after how many groups a rank is in,
which may differ among them. Neither has a hook, so both functions are replaced by ones that serve smddp's
groups and hand every other call on unchanged. Under torchrun and smdrun, torch takes for granted that the
launcher's own store listens at MASTER_ADDR:MASTER_PORT, so a script that sets these itself would wait
there for ever. And the store that torch makes for ``env://`` and ``tcp://`` listens on every interface,
whatever its address, and can be mistaken for the next one there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from opensmd.collectives.stores.deadlines import GRACE, call_within
from opensmd.collectives.stores.in_turn import StoresInTurn
from opensmd.collectives.stores.listening import (
    LOOPBACK,
    bound_socket,
    speaks_of_other_hosts,
    why_no_connection,
)
from opensmd.native import core

__all__ = [
    "backends_of",
    "connections_of",
    "cpu_backend",
    "default_group",
    "default_store",
    "gloo_group",
    "let_scripts_choose_the_rendezvous",
    "listen_where_asked",
    "rendezvous_address",
    "open_to_smddp",
    "pickle_objects_with",
    "remember_store",
    "shared_group",
    "timeout_of",
    "when_groups_are_made",
]

CONNECTIONS = 2  # between two members of Gloo: one a way (native/csrc/torch/hosts/wire.hpp)
_TAKEN = "EADDRINUSE"  # in the message of a store that cannot listen
_stores = StoresInTurn()


def open_to_smddp(name: str) -> None:
    """Let ``dist.monitored_barrier`` and ``dist.split_group`` take groups whose backend is ``name``."""
    _replace("monitored_barrier", functools.partial(_monitored_barrier_wrapper, name))
    _replace("split_group", functools.partial(_split_group_wrapper, name))


def let_scripts_choose_the_rendezvous(launchers_address: str) -> None:
    """Let rank 0 make the store itself where the script has changed MASTER_ADDR or MASTER_PORT.

    Args:
        launchers_address: ``address:port`` of the launcher's own store.
    """
    # torch.distributed has a function of the module's name, so an import statement would find that
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._torchelastic_use_agent_store

    @functools.wraps(original)
    def use_agent_store() -> bool:
        return bool(original()) and rendezvous_address() == launchers_address

    rendezvous._torchelastic_use_agent_store = use_agent_store


def listen_where_asked() -> None:
    """Let the store that torch makes on rank 0 listen at its own address alone; see ``stores.listening``.

    And let the others wait for its answer no longer than their timeout, and never meet the store of the
    default group before; see ``stores.in_turn``.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    @functools.wraps(original)
    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        seconds = timeout.total_seconds()
        usual = functools.partial(original, hostname, port, rank, world_size, timeout, use_libuv)
        connect = functools.partial(_connected, usual, rank, hostname, port, seconds)
        if rendezvous._torchelastic_use_agent_store():
            return connect()
        if rank != 0:
            return _stores.joined((hostname, port), connect, seconds)
        bound = None
        if not speaks_of_other_hosts(hostname, world_size, os.environ):
            with contextlib.suppress(OSError):  # taken, perhaps by this process's last store: torch knows
                bound = bound_socket(hostname, port)
        store = (
            connect()
            if bound is None
            else _listening(bound, hostname, world_size, timeout, use_libuv=use_libuv)
        )
        _stores.served(store)
        return store

    rendezvous._create_c10d_store = create


def _listening(
    bound: socket.socket, host: str, world_size: int, timeout: timedelta, *, use_libuv: bool
) -> TCPStore:
    """The store of a process that listens on ``bound``."""
    return TCPStore(
        host,
        bound.getsockname()[1],
        world_size,
        True,
        timeout,
        multi_tenant=True,
        master_listen_fd=bound.detach(),
        use_libuv=use_libuv,
    )


def remember_store(store: Any) -> None:
    """Know a group's store again, if this process meets one at the same address; all members have joined."""
    _stores.remember(store)


def _connected(connect: Callable[[], Any], rank: int, host: str, port: int, timeout: float) -> Any:
    """A client of the store at ``host`` and ``port``.

    Raises:
        DistBackendError: something accepts connections there and does not answer.
        DistNetworkError: nothing listens there, or this process is to and cannot.
    """
    cause = None
    try:
        return call_within(timeout + GRACE, connect)
    except TimeoutError:  # torch's own tries may take longer than it is told
        pass
    except dist.DistNetworkError as error:
        if _TAKEN in str(error):
            raise dist.DistNetworkError(
                f"rank {rank} serves the store in which the ranks meet, and cannot at {host}:{port}: another "
                "process has that port, perhaps of another job on this host. Choose another port "
                "(MASTER_PORT), or end that process."
            ) from error
        cause = error
    asked = f"rank {rank} asked for the store in which the ranks meet at {host}:{port}, and"
    if why_no_connection(host, port) is None:
        raise dist.DistBackendError(
            f"{asked} what listens there did not answer within {timeout:g} s. The process that serves it "
            "(rank 0's, or the launcher) is stopped, or another program has the port: end the job, and start "
            "it again or choose another port."
        ) from cause
    raise dist.DistNetworkError(
        f"{asked} nothing listened there for {timeout:g} s: start rank 0, which serves it, or give all ranks "
        "its address and port (MASTER_ADDR, MASTER_PORT)."
    ) from cause


def gloo_group(store: Any, rank: int, size: int, *, timeout: timedelta, one_network: bool) -> Any:
    """torch's Gloo over ``store``, with two connections between any two members over each interface.

    A message's tag says over which of them it goes: the remainder of a division by their number. Those of one
    interface are neighbours, so that each way has all interfaces.

    Args:
        store: of these members alone.
        rank: this process's place among them.
        size: how many they are.
        timeout: that an operation may take.
        one_network: all see the same loopback; Gloo then listens there alone, unless GLOO_SOCKET_IFNAME
            names an interface.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device for device in _gloo_devices(one_network) for _ in range(CONNECTIONS)]
    options._threads = 2 * len(options._devices)  # as torch itself does
    return dist.ProcessGroupGloo(store, rank, size, options)


def connections_of(gloo: Any) -> int:
    """How many connections of torch's Gloo any two members have."""
    return len(gloo.options._devices)


def _gloo_devices(one_network: bool) -> list[Any]:
    """One for each interface that the user has named, as torch itself makes them, or else one."""
    gloo: Any = dist.ProcessGroupGloo
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return [gloo.create_device(interface=name) for name in named.split(",")]
    return [gloo.create_device(hostname=LOOPBACK) if one_network else gloo.create_default_device()]


def pickle_objects_with(pickler: Any, unpickler: Any) -> None:
    """Let torch's object collectives use these in place of pickle's own."""
    c10d._pickler, c10d._unpickler = pickler, unpickler


def rendezvous_address() -> str:
    """Where ranks meet, as the environment says now."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def cpu_backend(group: dist.ProcessGroup | None) -> Any:
    """The backend that serves CPU tensors of ``group`` (None: the default group), unwrapped."""
    chosen = group or c10d._get_default_group()
    backend = chosen._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return c10d._get_default_group()


def default_store() -> Any:
    """The store through which the ranks of the default group met."""
    return c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the calls of a group wait for its members; None if its backend does not tell."""
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # not every backend has options
            options: Any = group._get_backend(device).options
            timeout: timedelta = options._timeout
            return timeout
    return None


def shared_group(group: dist.ProcessGroup | None) -> core.Group:
    """The core's group in shared memory behind ``group`` (None: the default group).

    Raises:
        RuntimeError: something else moves that group's data.
    """
    backend = cpu_backend(group)
    if not hasattr(backend, "shared_group"):
        raise RuntimeError(
            f"no shared memory serves this process group: its CPU backend is {backend.name()!r}. Give a "
            "group of the backend smddp whose ranks are all on one host"
        )
    found: core.Group = backend.shared_group
    return found


def backends_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """What serves a group, by the type of device, without what torch wraps around it to look for mistakes."""
    found = {}
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        found[device.type] = getattr(backend, "wrapped_pg", backend)
    return found


def when_groups_are_made(act: Callable[[dist.ProcessGroup, list[int]], object]) -> None:
    """Call ``act`` with every group of this process, and its global ranks, as soon as there is one."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **options: Any) -> Any:
            made = original(*args, **options)
            group = made[0] if isinstance(made, tuple) else made
            if isinstance(group, dist.ProcessGroup):
                given = inspect.signature(original).bind(*args, **options).arguments
                act(group, _ranks_of(group, given.get("global_ranks_in_group")))
            return made

        return make

    internal: Any = c10d
    internal._new_process_group_helper = wrap(internal._new_process_group_helper)
    _replace("split_group", wrap)


def _ranks_of(group: dist.ProcessGroup, given: Sequence[int] | None) -> list[int]:
    """The global ranks of a group that torch has just made; ``given`` where it does not know them yet."""
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
    """torch's own steps of split_group, without its demand that the groups are bound to an accelerator."""
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


# Since torch 2.14 split_group keeps the order of ranks and says who is in no part, both as new_group does.
_SPLITS_AS_NEW_GROUP = hasattr(c10d, "_NonGroupMember")
# How often each group was split; all its ranks count alike, because all take part.
_splits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _own_split(split_ranks: list[list[int]] | None, rank: int, size: int) -> list[int] | None:
    """The split that this rank is in, if any, in the order that torch's own split_group gives it."""
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
