"""Where a store's server listens: at the address that the ranks were given, if that is known.

torch's TCPStore listens on every interface of the host, whatever address it is given, and does not
authenticate clients. A server whose ranks use the loopback, or an address of this host, listens only there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

from opensmd.environment.loopback import LOOPBACK, LOOPBACK_NAMES

__all__ = [
    "LOOPBACK",
    "address_of_interface",
    "bound_socket",
    "gloo_is_on_loopback",
    "keep_on_loopback",
    "served_store",
    "speaks_of_other_hosts",
    "why_no_connection",
]

# Read by Gloo, NCCL and TensorPipe: the interface that they listen on.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def bound_socket(host: str, port: int) -> socket.socket | None:
    """Return a socket bound to ``host``, not yet listening; None if a server must use every interface.

    Args:
        host: as given to the ranks. Only the loopback and IP addresses of this host say where to listen;
            other hosts may resolve a host name to a different address than the host itself.
        port: 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    address = LOOPBACK if host == "localhost" else host
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    bound = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:  # an address that is forwarded to this host
            return None
        raise
    return bound


def speaks_of_other_hosts(host: str, world_size: int | None, environ: Mapping[str, str]) -> bool:
    """Whether ranks on other hosts may use another address for what the master calls ``host``; pure.

    Kubeflow's operator tells the master's pod "localhost" and all others the name of its service.
    """
    alone = world_size == 1 or environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return "KUBERNETES_SERVICE_HOST" in environ and host in LOOPBACK_NAMES and not alone


def served_store(host: str, port: int, world_size: int | None, *, timeout: timedelta) -> TCPStore:
    """Return a store that this process serves, only at ``host`` if :func:`bound_socket` can.

    It does not wait for the processes that will use it.

    Raises:
        OSError: the port is taken.
        DistError: as in torch's TCPStore.
    """
    bound = bound_socket(host, port)
    if bound is None:
        return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False)
    port, descriptor = bound.getsockname()[1], bound.detach()
    return TCPStore(  # closes the descriptor
        host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def why_no_connection(host: str, port: int, timeout: float = 1.0) -> OSError | None:
    """Why nothing accepts connections there now; None if something does, be its process stopped.

    Raises:
        OSError: this process may open no more files.
    """
    try:
        socket.create_connection((host, port), timeout=max(timeout, 0.05)).close()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return error
    return None


def address_of_interface(name: str) -> str | None:
    """The IP address of a network interface, IPv4 first; None if it has none."""
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for candidate in addresses:
            if candidate.family == family and not candidate.address.startswith("fe80"):
                return str(candidate.address)
    return None


def gloo_is_on_loopback(environ: Mapping[str, str]) -> bool:
    """Whether torch's Gloo, left to itself, listens where no other host can reach it.

    It takes the interfaces of GLOO_SOCKET_IFNAME, else the first address of this host's name that it can
    bind, else the loopback.
    """
    interfaces = environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        addresses = [address_of_interface(name) for name in interfaces.split(",")]
        return all(address is not None and ipaddress.ip_address(address).is_loopback for address in addresses)
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # Python cannot encode names that DNS cannot have
        return True
    usable = (str(address[0]) for *_, address in resolved if _can_bind(str(address[0])))
    return ipaddress.ip_address(next(usable, LOOPBACK)).is_loopback


def _can_bind(address: str) -> bool:
    with contextlib.suppress(OSError):
        bound = bound_socket(address, 0)
        if bound is not None:
            bound.close()
            return True
    return False


def keep_on_loopback() -> None:
    """Make Gloo, NCCL and RPC in this process and its children listen only on the loopback.

    Variables that are already set do not change.
    """
    with contextlib.suppress(OSError):
        name = next((name for _, name in socket.if_nameindex() if address_of_interface(name) == LOOPBACK), "")
        for variable in INTERFACE_VARIABLES if name else ():
            os.environ.setdefault(variable, name)
