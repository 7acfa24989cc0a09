"""One TCP connection between any two ranks of a job, established at the start.

Both ends prove that they know the job's secret (:mod:`.callers`): the user's, or else one that rank 0 left in
the store.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import closing

from opensmd.collectives.sealed import job_secret
from opensmd.environment.job_secret import VARIABLE, JobSecret
from opensmd.legacy._torch_internals import Store
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.rendezvous.server import ANYWHERE, LOOPBACK, Server, address_to_serve
from opensmd.legacy.settings import Deadline
from opensmd.legacy.transports.callers import Callers, introduce

__all__ = ["connect_all"]

SECRET_BYTES = 16
ADDRESS_SECONDS = 20.0  # for one address of a host with several


def connect_all(joined: Joined, interface: str | None, deadline: Deadline) -> dict[int, socket.socket]:
    """Connect to every other rank: each calls the lower ranks and is called by the higher ones.

    On one host they listen on the loopback, otherwise on ``interface``, or on all without one.

    Returns:
        A blocking socket per other rank.

    Raises:
        RuntimeError: a rank could not be reached, or did not call in time.
    """
    store, rank, world_size = joined.store, joined.rank, joined.world_size
    address = LOOPBACK if joined.one_network else address_to_serve(interface)
    secret = job_secret() or JobSecret(store.compare_set("links/secret", "", secrets.token_hex(SECRET_BYTES)))
    with closing(_listen(address)) as listener:
        own = Server.at(address, listener.getsockname()[1])
        store.set(f"links/{rank}", own.to_json())
        links = {peer: _call(store, peer, rank, secret, deadline) for peer in range(rank)}
        expected = set(range(rank + 1, world_size))
        with Callers(listener, rank, secret) as callers:
            while expected:
                peer, link = callers.next(expected, deadline)
                links[peer] = link
                expected.remove(peer)
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


def _call(store: Store, peer: int, rank: int, secret: JobSecret, deadline: Deadline) -> socket.socket:
    server = Server.from_json(store.get(f"links/{peer}"))
    errors = []
    for address in server.addresses_from(Process.this()):
        try:
            patience = min(max(deadline.remaining(), 0.1), ADDRESS_SECONDS)
            link = socket.create_connection((address, server.port), timeout=patience)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        link.settimeout(max(deadline.remaining(), 0.1))
        if introduce(link, peer, rank, secret):
            return link
        link.close()
        errors.append(f"{address}: what listens there does not know the secret of this job")
    raise RuntimeError(
        f"rank {peer} ({server.process}) cannot be reached at port {server.port} ({'; '.join(errors)}); "
        f"open the network between the hosts to the job, and give {VARIABLE} alike to all processes, or to "
        "none"
    )
