"""One TCP connection between any two ranks of a job, made once at the start.

Both ends show that they know the job's secret before either believes the other::

    caller                                          listener
      nonce, its rank  ───────────────────────────▶
                       ◀───────────────────────────  nonce, proof over both nonces and ranks
      proof            ───────────────────────────▶

The secret is the one that the user gave the job, else one that rank 0 left in the store.
"""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import closing

from opensmd.collectives.sealed import job_secret
from opensmd.environment.job_secret import PROOF_BYTES, VARIABLE, JobSecret
from opensmd.legacy._torch_internals import Store
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.rendezvous.server import ANYWHERE, LOOPBACK, Server, address_to_serve
from opensmd.legacy.settings import Deadline

__all__ = ["connect_all"]

SECRET_BYTES = 16
NONCE_BYTES = 32
HELLO = struct.Struct(f"!{NONCE_BYTES}sq")  # the caller's nonce and rank
ANSWER = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
STRANGER_SECONDS = 3.0
_CALLER, _LISTENER = "caller of a link", "listener of a link"  # so that no proof serves the other side
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
    secret = job_secret() or JobSecret(store.compare_set("links/secret", "", secrets.token_hex(SECRET_BYTES)))
    with closing(_listen(address)) as listener:
        own = Server.at(address, listener.getsockname()[1])
        store.set(f"links/{rank}", own.to_json())
        links = {peer: _call(store, peer, rank, secret, deadline) for peer in range(rank)}
        while len(links) < world_size - 1:
            peer, link = _answer(listener, rank, secret, deadline, set(range(world_size)) - {rank, *links})
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
        if _introduce(link, peer, rank, secret):
            return link
        link.close()
        errors.append(f"{address}: what listens there does not know the secret of this job")
    raise RuntimeError(
        f"rank {peer} ({server.process}) cannot be reached at port {server.port} ({'; '.join(errors)}); "
        f"open the network between the hosts to the job, and give {VARIABLE} alike to all processes, or to "
        "none"
    )


def _introduce(link: socket.socket, peer: int, rank: int, secret: JobSecret) -> bool:
    """Whether ``peer`` knows the secret; then it is shown that this rank does, too."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        link.sendall(HELLO.pack(nonce, rank))
        theirs, proof = ANSWER.unpack(link.recv(ANSWER.size, socket.MSG_WAITALL))
        session = _session(nonce, theirs, rank, peer)
        if not secret.proves(proof, _LISTENER, session):
            return False
        link.sendall(secret.proof(_CALLER, session))
    except (OSError, struct.error):
        return False
    return True


def _session(callers: bytes, listeners: bytes, caller: int, listener: int) -> bytes:
    return callers + listeners + struct.pack("!qq", caller, listener)


def _answer(
    listener: socket.socket, rank: int, secret: JobSecret, deadline: Deadline, expected: set[int]
) -> tuple[int, socket.socket]:
    """The next rank that calls; strangers are turned away."""
    strangers = 0
    while True:
        listener.settimeout(max(deadline.remaining(), 0.1))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            ranks = ", ".join(map(str, sorted(expected)))
            turned_away = f"; {strangers} callers did not know the secret of this job" * bool(strangers)
            raise RuntimeError(
                f"rank(s) {ranks} did not connect within {deadline.seconds:g} s{turned_away}"
            ) from None
        link.settimeout(STRANGER_SECONDS)
        peer = _recognise(link, rank, secret)
        if peer in expected:
            return peer, link
        strangers += 1
        link.close()


def _recognise(link: socket.socket, rank: int, secret: JobSecret) -> int:
    """The rank that calls, or -1 for one that does not know the secret."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        theirs, peer = HELLO.unpack(link.recv(HELLO.size, socket.MSG_WAITALL))
        session = _session(theirs, nonce, peer, rank)
        link.sendall(ANSWER.pack(nonce, secret.proof(_LISTENER, session)))
        given = link.recv(PROOF_BYTES, socket.MSG_WAITALL)
    except (OSError, struct.error):
        return -1
    return int(peer) if secret.proves(given, _CALLER, session) else -1
