"""Choosing the network interface for several hosts, because a host's own name may lead to its loopback."""

from __future__ import annotations

import os
import socket

import psutil

from opensmd.collectives.stores.listening import gloo_is_on_loopback

__all__ = ["choose_towards", "interface_towards"]


def choose_towards(host: str, port: int) -> None:
    """Make Gloo use the interface that leads to ``host``, unless the user or Gloo itself has found one."""
    if not os.environ.get("GLOO_SOCKET_IFNAME") and gloo_is_on_loopback(os.environ):
        name = interface_towards(host, port)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface that reaches ``host`` or has its address; None for the loopback."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # Python cannot encode names that DNS cannot have
        return None
    if own.startswith("127.") or own == "::1":
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    return None
