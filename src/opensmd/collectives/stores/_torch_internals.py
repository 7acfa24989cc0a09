"""Changes to how torch creates the store in which ranks meet.

Under torchrun and smdrun, torch assumes that the launcher's own store listens at MASTER_ADDR:MASTER_PORT and
at any ``tcp://`` address from a script, so a script that sets its own would wait there forever. And torch's
store for ``env://`` and ``tcp://`` listens on every interface, whatever its address, and can be mistaken for
the next one there. Neither has a hook, so the two functions that decide this are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from opensmd.collectives.stores.deadlines import GRACE, call_within
from opensmd.collectives.stores.in_turn import StoresInTurn
from opensmd.collectives.stores.listening import bound_socket, speaks_of_other_hosts, why_no_connection
from opensmd.collectives.stores.place import require_place
from opensmd.environment.loopback import LOOPBACK_NAMES, why_loopback_is_down
from opensmd.environment.variables import chosen_port

__all__ = [
    "let_scripts_choose_the_rendezvous",
    "listen_where_asked",
    "remember_store",
    "rendezvous_address",
]

_TAKEN = "EADDRINUSE"  # in the error of a store that cannot listen
_stores = StoresInTurn()


class _StoreAsked(threading.local):
    """What this thread has been asked for."""

    port: int | None = None  # that of the store being created


_asked = _StoreAsked()


def let_scripts_choose_the_rendezvous(launchers_address: str) -> None:
    """Let rank 0 create the store if the script has changed MASTER_ADDR or MASTER_PORT.

    Also if it gives another port in a ``tcp://`` address.

    Args:
        launchers_address: ``address:port`` of the launcher's own store.
    """
    # torch.distributed has a function of the module's name, so an import statement would find that
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._torchelastic_use_agent_store
    launchers_port = launchers_address.rpartition(":")[2]

    @functools.wraps(original)
    def use_agent_store() -> bool:
        if _asked.port is not None and str(_asked.port) != launchers_port:
            return False
        return bool(original()) and rendezvous_address() == launchers_address

    rendezvous._torchelastic_use_agent_store = use_agent_store


def rendezvous_address() -> str:
    """Return where ranks meet according to the current environment."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def listen_where_asked() -> None:
    """Make torch's store on rank 0 listen only at its own address; see ``stores.listening``.

    The others wait for its answer at most for their timeout, and never meet the previous default group's
    store; see ``stores.in_turn``. An impossible rank is refused before it waits.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    @functools.wraps(original)
    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        require_place(rank, world_size)
        down = why_loopback_is_down() if hostname in LOOPBACK_NAMES else None
        if down is not None:
            raise dist.DistNetworkError(down)
        seconds = timeout.total_seconds()
        arguments = hostname, port, rank, world_size, timeout, use_libuv
        usual = functools.partial(_asked_for, port, original, *arguments)
        connect = functools.partial(_connected, usual, rank, hostname, port, seconds)
        if _asked_for(port, rendezvous._torchelastic_use_agent_store):
            return connect()
        if rank != 0:
            return _stores.joined((hostname, port), connect, seconds)
        bound = None
        if not speaks_of_other_hosts(hostname, world_size, os.environ):
            # taken, perhaps by this process's last store, or not a port; torch will say
            with contextlib.suppress(OSError, OverflowError):
                bound = bound_socket(hostname, port)
            if bound is None and world_size == 1 and str(port) == chosen_port():
                bound = bound_socket(hostname, 0)  # a parent has the port, and nobody else comes
        store = (
            connect()
            if bound is None
            else _listening(bound, hostname, world_size, timeout, use_libuv=use_libuv)
        )
        _stores.served(store)
        return store

    rendezvous._create_c10d_store = create


def _asked_for(port: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, which may ask whether the launcher's store is the one at ``port``."""
    _asked.port = port
    try:
        return function(*args)
    finally:
        _asked.port = None


def _listening(
    bound: socket.socket, host: str, world_size: int, timeout: timedelta, *, use_libuv: bool
) -> TCPStore:
    """Create the store of a process that listens on ``bound``."""
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
    """Remember a group's store, to recognize it at the same address; all members have joined."""
    _stores.remember(store)


def _connected(connect: Callable[[], Any], rank: int, host: str, port: int, timeout: float) -> Any:
    """Return a client of the store at ``host`` and ``port``.

    Raises:
        DistBackendError: something accepts connections there and does not answer.
        DistNetworkError: nothing listens there, or this process should but cannot.
    """
    cause = None
    try:
        return call_within(timeout + GRACE, connect)
    except TimeoutError:  # torch's own retries may exceed its timeout
        pass
    except dist.DistNetworkError as error:
        if _TAKEN in str(error):
            raise dist.DistNetworkError(
                f"rank {rank} serves the store in which the ranks meet, and cannot at {host}:{port}: another "
                "process has that port, perhaps of another job on this host. Choose another port "
                "(MASTER_PORT), or end that process."
            ) from error
        cause = error
    request = f"rank {rank} asked for the store in which the ranks meet at {host}:{port}, and"
    why = why_no_connection(host, port)
    if why is None:
        raise dist.DistBackendError(
            f"{request} what listens there did not answer within {timeout:g} s. The process that serves it "
            "(rank 0's, or the launcher) is stopped, or another program has the port: end the job, and start "
            "it again or choose another port."
        ) from cause
    if isinstance(why, socket.gaierror):
        raise dist.DistNetworkError(
            f"{request} this host did not know {host!r} for {timeout:g} s ({why.strerror}): give all ranks a "
            "name that their hosts know, or an address (MASTER_ADDR)."
        ) from cause
    raise dist.DistNetworkError(
        f"{request} nothing listened there for {timeout:g} s: start rank 0, which serves it, or give all "
        "ranks its address and port (MASTER_ADDR, MASTER_PORT)."
    ) from cause
