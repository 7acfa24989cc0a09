"""Messages between any two ranks, for ``send``, ``recv``, ``isend`` and ``irecv`` of CPU tensors.

Gloo cannot carry these: its sends wait for their receivers, its requests never complete by themselves, and a
message of unexpected size ends the process. Here one thread reads all that comes in, directly into the tensor
if a receive was already posted, otherwise into memory. So sends do not wait for receives, the order between
two ranks is kept, and sizes are compared before a byte is copied.

    caller ──header, payload──▶ socket ──▶ reader thread ──▶ posted receive, or the pile until one is posted
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from opensmd.legacy.requests import Request
from opensmd.legacy.transports.message_requests import Receive, Sent
from opensmd.legacy.transports.wire import bytes_of, in_memory

__all__ = ["Messages"]

HEADER = struct.Struct("!qq")  # number of elements, index into DTYPES
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
PILE_LIMIT = 256 << 20  # bytes of one rank's messages without a receive; above, its sends wait
AT_ONCE = 64 << 10  # bytes that isend writes itself; a thread writes larger messages
READ_AT_MOST = 4 << 20  # bytes from one rank before the others get their turn
FLUSH_SECONDS = 30.0


@dataclass(eq=False)
class Arrival:
    """An arriving message; ``receive`` is its destination, once known."""

    source: int
    count: int
    dtype: torch.dtype
    buffer: memoryview
    direct: bool = False  # whether the buffer is the receive's own
    got: int = 0
    receive: Receive | None = None
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return self.got == len(self.buffer)


@dataclass
class Peer:
    """Another rank: its connection, and what is partly read or queued on it."""

    rank: int
    link: socket.socket
    header: bytearray = field(default_factory=bytearray)
    reading: Arrival | None = None
    piled: int = 0
    paused: bool = False
    closed: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)
    writer: ThreadPoolExecutor | None = None
    last_write: Future[None] | None = None


class Messages:
    """One rank's end of all messages.

    Args:
        links: a connected socket for every other rank.
        rank: this process's rank.
        timeout: seconds after which a send or receive fails.
    """

    def __init__(self, links: dict[int, socket.socket], rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._peers = {peer: Peer(peer, link) for peer, link in links.items()}
        self._lock = threading.Lock()  # guards the pile, the posted receives and the peers' reading state
        self._pile: deque[Arrival] = deque()
        self._posted: deque[Receive] = deque()
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ)
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for peer in self._peers.values():
            peer.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._selector.register(peer.link, selectors.EVENT_READ, peer)
        self._reader = threading.Thread(target=self._read_all, daemon=True, name="opensmd-legacy-messages")
        self._reader.start()

    # --- sending

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send ``tensor``; return when it may be changed."""
        peer = self._peers[dst]
        payload = in_memory(tensor.detach().cpu())
        if self._idle(peer):
            self._write(peer, payload)
        else:
            self._enqueue(peer, payload).wait()

    def isend(self, tensor: torch.Tensor, dst: int) -> Request:
        """Start sending; the tensor may be changed when the request is complete."""
        peer = self._peers[dst]
        payload = in_memory(tensor.detach().cpu())
        if payload.nbytes <= AT_ONCE and self._idle(peer):
            self._write(peer, payload)
            return Sent(None, self._timeout)
        return self._enqueue(peer, payload)

    def _idle(self, peer: Peer) -> bool:
        return peer.last_write is None or peer.last_write.done()

    def _enqueue(self, peer: Peer, payload: torch.Tensor) -> Request:
        if peer.writer is None:
            peer.writer = ThreadPoolExecutor(1, thread_name_prefix="opensmd-legacy-send")
        peer.last_write = peer.writer.submit(self._write, peer, payload)
        return Sent(peer.last_write, self._timeout)

    def _write(self, peer: Peer, payload: torch.Tensor) -> None:
        if payload.dtype not in DTYPES:
            raise TypeError(f"send: {payload.dtype} is not known here; send tensor.view(torch.uint8) instead")
        header = HEADER.pack(payload.numel(), DTYPES.index(payload.dtype))
        try:
            with peer.sending:
                peer.link.sendall(header, socket.MSG_MORE if payload.numel() else 0)
                peer.link.sendall(bytes_of(payload))
        except BlockingIOError:
            # Half a message may be in transit, so nothing that follows could be understood.
            peer.link.shutdown(socket.SHUT_RDWR)
            raise RuntimeError(
                f"send on rank {self._rank} to rank {peer.rank}: not taken within {self._timeout:g} s; "
                "check that it receives, or raise OPENSMD_LEGACY_TIMEOUT"
            ) from None
        except OSError as error:
            raise RuntimeError(f"send on rank {self._rank}: {_ended(peer.rank)} ({error})") from error

    # --- receiving

    def recv(self, tensor: torch.Tensor, src: int | None) -> int:
        """Receive from ``src``, or from any rank; return the sender."""
        receive = self.irecv(tensor, src)
        try:
            receive.wait()
        except RuntimeError:
            with self._lock, contextlib.suppress(ValueError):
                self._posted.remove(receive)  # a message that comes now is for the next receive
            raise
        assert receive.sender is not None
        return receive.sender

    def irecv(self, tensor: torch.Tensor, src: int | None) -> Receive:
        """Post a receive from ``src``, or from any rank."""
        receive = Receive(tensor, src, self._rank, self._timeout)
        with self._lock:
            arrival = next((one for one in self._pile if src is None or one.source == src), None)
            if arrival is not None:
                self._take(arrival, receive)
            elif self._is_closed(src):
                receive.fail(f"recv on rank {self._rank}: {_ended(src)}")
            else:
                self._posted.append(receive)
        return receive

    def _take(self, arrival: Arrival, receive: Receive) -> None:
        """Give a message from the pile to a receive that was posted after its header came."""
        self._pile.remove(arrival)
        peer = self._peers[arrival.source]
        peer.piled -= len(arrival.buffer)
        if peer.paused and peer.piled <= PILE_LIMIT:
            self._bell.send(b"!")
        arrival.receive = receive
        arrival.error = receive.mismatch(arrival.source, arrival.count, arrival.dtype)
        if arrival is not peer.reading:  # else the reader delivers it, even if all of it has come
            _deliver(arrival)

    def _is_closed(self, src: int | None) -> bool:
        if src is not None:
            return self._peers[src].closed
        return all(peer.closed for peer in self._peers.values())

    # --- the reader thread

    def _read_all(self) -> None:
        while len(self._selector.get_map()) > 1 or self._any_paused():
            for key, _ in self._selector.select():
                if key.data is None:
                    self._ear.recv(64)
                    self._resume()
                else:
                    self._read_some(key.data)
        self._selector.close()

    def _any_paused(self) -> bool:
        return any(peer.paused and not peer.closed for peer in self._peers.values())

    def _resume(self) -> None:
        for peer in self._peers.values():
            if peer.paused and peer.piled <= PILE_LIMIT:
                peer.paused = False
                self._selector.register(peer.link, selectors.EVENT_READ, peer)

    def _read_some(self, peer: Peer) -> None:
        """Read what is available, without waiting; close the peer at end of stream."""
        budget = READ_AT_MOST
        try:
            while budget > 0 and not peer.paused:
                budget -= self._read_header(peer) if peer.reading is None else self._read_payload(peer)
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self._close(peer)

    def _read_header(self, peer: Peer) -> int:
        part = peer.link.recv(HEADER.size - len(peer.header), socket.MSG_DONTWAIT)
        if not part:
            raise EOFError
        peer.header += part
        if len(peer.header) == HEADER.size:
            count, index = HEADER.unpack(peer.header)
            peer.header.clear()
            with self._lock:
                peer.reading = self._admit(peer, count, DTYPES[index])
            self._finish_if_complete(peer)
        return len(part)

    def _admit(self, peer: Peer, count: int, dtype: torch.dtype) -> Arrival:
        """Choose a message's destination: the first receive that waits for it, or the pile."""
        receive = next((one for one in self._posted if one.source in (None, peer.rank)), None)
        error = None
        if receive is not None:
            self._posted.remove(receive)
            error = receive.mismatch(peer.rank, count, dtype)
        direct = receive is not None and error is None
        if receive is not None and error is None:
            buffer = receive.landing
        else:
            buffer = memoryview(bytearray(count * dtype.itemsize))
        arrival = Arrival(peer.rank, count, dtype, buffer, direct, receive=receive, error=error)
        if receive is None:
            self._pile.append(arrival)
            peer.piled += len(buffer)
        return arrival

    def _read_payload(self, peer: Peer) -> int:
        arrival = peer.reading
        assert arrival is not None
        got = peer.link.recv_into(arrival.buffer[arrival.got :], 0, socket.MSG_DONTWAIT)
        if not got:
            raise EOFError
        arrival.got += got
        self._finish_if_complete(peer)
        return got

    def _finish_if_complete(self, peer: Peer) -> None:
        with self._lock:
            arrival = peer.reading
            if arrival is None or not arrival.complete:
                return
            peer.reading = None
            if arrival.receive is not None:
                _deliver(arrival)
            if peer.piled > PILE_LIMIT:
                peer.paused = True
                self._selector.unregister(peer.link)

    def _close(self, peer: Peer) -> None:
        """Close a peer that has ended or left, from which nothing more will come."""
        self._selector.unregister(peer.link)
        with self._lock:
            peer.closed = True
            peer.link.close()
            if peer.reading is not None:
                self._give_up(peer.reading)
            for receive in [posted for posted in self._posted if self._is_closed(posted.source)]:
                self._posted.remove(receive)
                receive.fail(f"recv on rank {self._rank}: {_ended(receive.source)}")

    def _give_up(self, arrival: Arrival) -> None:
        """Forget a message whose rest will not come."""
        if arrival.receive is None:
            self._pile.remove(arrival)
        else:
            arrival.receive.fail(f"recv on rank {self._rank}: {_ended(arrival.source)} in mid-message")

    # --- the end

    def close(self) -> None:
        """Write what is queued, then tell the peers; read what they send until they close, too."""
        try:
            for peer in self._peers.values():
                if peer.last_write is not None and not peer.closed:
                    Sent(peer.last_write, min(self._timeout, FLUSH_SECONDS)).wait()
        finally:
            for peer in self._peers.values():
                self._say_farewell(peer)

    def _say_farewell(self, peer: Peer) -> None:
        if peer.writer is not None:
            peer.writer.shutdown(wait=False)
        with self._lock, contextlib.suppress(OSError):  # a peer that is gone needs none
            peer.link.shutdown(socket.SHUT_WR)


def _deliver(arrival: Arrival) -> None:
    receive = arrival.receive
    assert receive is not None
    if arrival.error is not None:
        receive.fail(arrival.error)
        return
    if not arrival.direct:
        receive.landing[:] = arrival.buffer
    receive.succeed(arrival.source)


def _ended(rank: int | None) -> str:
    who = "every other rank" if rank is None else f"rank {rank}"
    return f"{who} has closed its connection: it ended, or called destroy_process_group"
