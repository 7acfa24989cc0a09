"""Two network namespaces with a cable between them: two hosts, as far as the network can tell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ADDRESSES", "CABLE", "two_networks"]

CABLE = "cable"  # the network interface in both
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# What may wait at an end of the cable: enough that nothing is lost, and sent at most at once.
QUEUE_MS, BURST_BYTES = 1000, 1 << 20


@contextmanager
def two_networks(megabits: float | None = None) -> Iterator[tuple[str, str]]:
    """Make two namespaces; commands run in one with ``ip netns exec NAME``.

    Args:
        megabits: what the cable carries a second, each way; None: as much as the machine can.

    Yields:
        Their names; they have the :data:`ADDRESSES` in this order.

    Raises:
        PermissionError: this user may not make namespaces, or there is no ``ip`` or ``tc``.
    """
    first, second = (f"opensmd-{os.getpid()}-{side}" for side in "ab")
    made: list[str] = []
    try:
        try:
            for name in (first, second):
                _run("ip", "netns", "add", name)
                made.append(name)
            # The ends of the cable are born inside: nothing is added to this machine's own network.
            ends = ("add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second)
            _run("ip", "-n", first, "link", *ends)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"this user may not make network namespaces: {error}") from error
        for name, address in zip((first, second), ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if megabits is not None:
                limit = ("rate", f"{megabits}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *limit)
        yield first, second
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
