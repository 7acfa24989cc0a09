"""One TCP connection between any two ranks of a job, made once at the start."""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import closing

from opensmd.legacy._torch_internals import Store
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.meeting import Joined
from opensmd.legacy.rendezvous.server import ANYWHERE, LOOPBACK, Server, address_to_serve
from opensmd.legacy.settings import Deadline

__all__ = ["connect_all"]

SECRET_BYTES = 16
HELLO = struct.Struct(f"!{SECRET_BYTES}sq")  # the job's secret, the caller's rank
STRANGER_SECONDS = 3.0
ADDRESS_SECONDS = 20.0  # for one address of a host that has several


def connect_all(joined: Joined, interface: str | None, deadline: Deadline) -> dict[int, socket.socket]:
    """Connect with every other rank: each calls the lower ranks and is called by the higher ones.

    On one host they listen on the loopback, else on ``interface``; without one, on all.

    Returns:
        A blocking socket for each other rank.

    Raises:
        RuntimeError: a rank could not be reached, or did not call in time.
    """
    store, rank, world_size = joined.store, joined.rank, joined.world_size
    address = LOOPBACK if joined.one_network else address_to_serve(interface)
    secret = bytes.fromhex(store.compare_set("links/secret", "", secrets.token_hex(SECRET_BYTES)).decode())
    with closing(_listen(address)) as listener:
        own = Server.at(address, listener.getsockname()[1])
        store.set(f"links/{rank}", own.to_json())
        links = {peer: _call(store, peer, HELLO.pack(secret, rank), deadline) for peer in range(rank)}
        while len(links) < world_size - 1:
            peer, link = _answer(listener, secret, deadline, set(range(world_size)) - {rank, *links})
            links[peer] = link
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _listen(address: str) -> socket.socket:
    if address != ANYWHERE:
        return socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=128
        )
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=128)


def _call(store: Store, peer: int, hello: bytes, deadline: Deadline) -> socket.socket:
    server = Server.from_json(store.get(f"links/{peer}"))
    errors = []
    for address in server.addresses_from(Process.this()):
        try:
            patience = min(max(deadline.remaining(), 0.1), ADDRESS_SECONDS)
            link = socket.create_connection((address, server.port), timeout=patience)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        link.sendall(hello)
        return link
    raise RuntimeError(
        f"rank {peer} ({server.process}) cannot be reached at port {server.port} ({'; '.join(errors)}); "
        "open the network between the hosts to the job"
    )


def _answer(
    listener: socket.socket, secret: bytes, deadline: Deadline, expected: set[int]
) -> tuple[int, socket.socket]:
    """The next rank that calls; strangers are turned away."""
    while True:
        listener.settimeout(max(deadline.remaining(), 0.1))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            ranks = ", ".join(map(str, sorted(expected)))
            raise RuntimeError(f"rank(s) {ranks} did not connect within {deadline.seconds:g} s") from None
        link.settimeout(STRANGER_SECONDS)
        try:
            given, peer = HELLO.unpack(link.recv(HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            given, peer = b"", -1
        if given == secret and peer in expected:
            return peer, link
        link.close()
