"""The network interface of ranks on several hosts, where a host's own name leads to its loopback."""

from __future__ import annotations

import os
import socket

import psutil

from opensmd.collectives.stores.listening import gloo_is_on_loopback

__all__ = ["choose_towards", "interface_towards"]


def choose_towards(host: str, port: int) -> None:
    """Let Gloo use the interface that leads to ``host``, unless the user or Gloo itself finds another."""
    if not os.environ.get("GLOO_SOCKET_IFNAME") and gloo_is_on_loopback(os.environ):
        name = interface_towards(host, port)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str, port: int) -> str | None:
    """The interface from which ``host`` is reached, or that has its address; None for the loopback."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # to connect it sends nothing
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # Python encodes no name that DNS could not have
        return None
    if own.startswith("127.") or own == "::1":
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    return None
