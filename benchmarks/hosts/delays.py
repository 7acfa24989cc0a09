"""``python -m benchmarks.hosts.delays 0.001 port0 port1 …``: a switch that keeps frames for so many seconds.

It forwards between interfaces of the network that it runs in, where the kernel has nothing that delays.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque

__all__ = ["READY"]

READY = "ready"  # what it writes when it forwards

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 15, 23, 33
HEADER = 10  # of a frame as the kernel hands it over: what is still to be cut up, and which sums to be made
MOST = HEADER + (64 << 10) + 64  # frames that are still to be cut up, with their own headers
GROUP_BIT = 1  # of an address: meant for several


class DelayingSwitch:
    """Forwards frames between ports, each to the one behind which its receiver was seen."""

    def __init__(self, names: list[str], delay: float) -> None:
        self._ports = [_port(name) for name in names]
        self._delay = delay
        self._behind: dict[bytes, socket.socket] = {}
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # all wait equally long

    def run(self) -> None:
        """Forward for ever."""
        while True:
            left = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for port in select.select(self._ports, [], [], left)[0]:
                self._take(port)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                self._forward(*self._waiting.popleft()[1:])

    def _take(self, port: socket.socket) -> None:
        due = time.monotonic() + self._delay
        while True:
            try:
                frame = port.recv(MOST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._behind[frame[HEADER + 6 : HEADER + 12]] = port
            self._waiting.append((due, port, frame))

    def _forward(self, source: socket.socket, frame: bytes) -> None:
        receiver = frame[HEADER : HEADER + 6]
        known = None if receiver[0] & GROUP_BIT else self._behind.get(receiver)
        for port in [known] if known else self._ports:
            if port is not source:
                port.send(frame)


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    port.bind((name, ETH_P_ALL))
    return port


def main() -> None:
    """Forward until this process is ended."""
    policy = os.sched_getscheduler(0)
    if policy != os.SCHED_OTHER:  # nothing that it delays may keep it waiting
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_getparam(0).sched_priority + 1))
    switch = DelayingSwitch(sys.argv[2:], float(sys.argv[1]))
    print(READY, flush=True)
    switch.run()


if __name__ == "__main__":
    main()
