"""Handling calls to a listening rank: ranks that know the job's secret are accepted, strangers rejected.

Both ends prove that they know the secret before either trusts the other::

    caller                                          listener
      nonce, its rank  ───────────────────────────▶
                       ◀───────────────────────────  nonce, proof over both nonces and ranks
      proof            ───────────────────────────▶

A listener handles any number of greetings at once, so nobody waits for a silent caller, be it a stranger or a
rank that is held up during its greeting.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
from collections.abc import Collection, Generator

from opensmd.environment.job_secret import PROOF_BYTES, JobSecret
from opensmd.legacy.settings import Deadline

__all__ = ["ANSWER", "HELLO", "Callers", "introduce"]

NONCE_BYTES = 32
HELLO = struct.Struct(f"!{NONCE_BYTES}sq")  # the caller's nonce and rank
ANSWER = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
_CALLER, _LISTENER = "caller of a link", "listener of a link"  # so that no proof serves the other side
_STRANGER = -1  # in place of a rank

_Greeting = Generator[None, None, int]


class Callers:
    """The callers of one rank; a context manager that hangs up on those that were not taken.

    Args:
        listener: a bound socket, not closed by this.
        rank: of the listener.
        secret: of the job.
    """

    def __init__(self, listener: socket.socket, rank: int, secret: JobSecret) -> None:
        self._listener, self._rank, self._secret = listener, rank, secret
        self._strangers = 0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._greetings: dict[socket.socket, _Greeting] = {}

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for link in self._greetings:
            link.close()

    def next(self, expected: Collection[int], deadline: Deadline) -> tuple[int, socket.socket]:
        """Wait for the next of the ``expected`` ranks; return its number and a connection without a timeout.

        Raises:
            RuntimeError: none has called before ``deadline``; the text names them.
        """
        while True:
            over = deadline.passed  # those that have called by now still count
            ready = self._selector.select(0 if over else deadline.remaining())
            if over and not ready:
                ranks = ", ".join(map(str, sorted(expected)))
                turned_away = f"; {self._strangers} callers did not know the secret of this job"
                raise RuntimeError(
                    f"rank(s) {ranks} did not connect within {deadline.seconds:g} s"
                    + turned_away * bool(self._strangers)
                )
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                assert isinstance(key.fileobj, socket.socket)
                peer = self._go_on(key.fileobj)
                if peer is None:
                    continue
                if peer in expected:
                    key.fileobj.setblocking(True)
                    return peer, key.fileobj
                key.fileobj.close()
                self._strangers += 1

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # it has hung up since
            return
        link.setblocking(False)
        greeting = _greet(link, self._rank, self._secret)
        next(greeting)
        self._greetings[link] = greeting
        self._selector.register(link, selectors.EVENT_READ)

    def _go_on(self, link: socket.socket) -> int | None:
        """Read more from a caller; return None until it is identified."""
        try:
            next(self._greetings[link])
        except StopIteration as recognised:
            del self._greetings[link]
            self._selector.unregister(link)
            return int(recognised.value)
        return None


def introduce(link: socket.socket, peer: int, rank: int, secret: JobSecret) -> bool:
    """Whether the listening ``peer`` knows the secret; if so, prove that this rank does, too."""
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


def _greet(link: socket.socket, rank: int, secret: JobSecret) -> _Greeting:
    """Greet a caller and return its rank; resumed whenever there is something to read.

    Each message of a caller is short enough to arrive in one piece.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        yield
        theirs, peer = HELLO.unpack(link.recv(HELLO.size))
        session = _session(theirs, nonce, peer, rank)
        link.sendall(ANSWER.pack(nonce, secret.proof(_LISTENER, session)))
        yield
        proof = link.recv(PROOF_BYTES)
    except (OSError, struct.error):
        return _STRANGER
    return int(peer) if secret.proves(proof, _CALLER, session) else _STRANGER


def _session(callers: bytes, listeners: bytes, caller: int, listener: int) -> bytes:
    return callers + listeners + struct.pack("!qq", caller, listener)
