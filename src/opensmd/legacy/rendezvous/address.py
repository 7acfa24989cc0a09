"""What an ``init_method`` says: pure parsing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

__all__ = ["Address", "check_rank", "parse_init_method"]


@dataclass(frozen=True)
class Address:
    """A parsed ``init_method``.

    Attributes:
        method: ``tcp``, ``multicast``, ``file`` or ``env``.
        host: host name or IP address (without brackets), for ``tcp`` and ``multicast``.
        port: TCP or UDP port.
        path: the shared file.
    """

    method: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.method == "file":
            return f"file://{self.path}"
        if self.method == "env":
            return "env://"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def check_rank(address: Address, rank: int, world_size: int) -> None:
    """Refuse an impossible rank; -1 asks for any.

    Raises:
        ValueError: the rank is outside 0 to ``world_size - 1``.
    """
    if not -1 <= rank < world_size:
        raise ValueError(
            f"{address}: this process asks for rank {rank}; expected 0 to {world_size - 1} with world_size "
            f"{world_size}"
        )


def parse_init_method(init_method: str) -> Address:
    """Read ``env://``, ``tcp://host:port``, ``tcp://[multicast]:port`` or ``file:///path``.

    Raises:
        ValueError: another scheme, or a part that is missing or malformed.
    """
    parts = urlsplit(init_method)
    if parts.scheme == "env":
        return Address("env")
    if parts.scheme == "file":
        path = unquote(parts.netloc + parts.path)
        if not path or path.endswith("/"):
            raise ValueError(
                f"{init_method!r}: expected file:// and the path of a file in a shared directory"
            )
        return Address("file", path=path)
    if parts.scheme == "tcp":
        return _tcp(init_method)
    raise ValueError(
        f"unknown init method: {init_method!r}; expected env://, tcp://host:port, tcp://[multicast "
        "address]:port or file:///path"
    )


def _tcp(init_method: str) -> Address:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ValueError(f"{init_method!r}: expected tcp://host:port with a port from 1 to 65535")
    return Address("multicast" if _is_multicast(host) else "tcp", host, port)


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_multicast
    except ValueError:
        return False
