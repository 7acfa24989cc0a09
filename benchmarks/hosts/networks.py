"""Network namespaces with cables between them: several hosts, as far as the network can tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from benchmarks.harness.mpi import ROOT
from benchmarks.hosts.delays import READY

__all__ = ["ADDRESSES", "CABLE", "networks", "two_networks"]

CABLE = "cable"  # the network interface in all
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# What may wait at an end of the cable: enough that nothing is lost.
QUEUE_MS = 1000
# What a rested cable lets pass at once: little, so that small messages take their time, too.
LEAST_AT_ONCE, SECONDS_AT_ONCE = 32 << 10, 100e-6
# The kernel hands over a connection's data in pieces of many packets, as to a network card that cuts them up
# itself. Larger ones than what may pass at once would be cut up by the cores on which ranks compute. On the
# cable, each packet takes the time of its headers, too.
PIECES_AT_ONCE, LARGEST_PIECE = 2, 64000


@contextmanager
def two_networks(megabits: float | None = None) -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a cable, with the :data:`ADDRESSES`; see :func:`networks`."""
    with networks(2, megabits) as (first, second):
        yield first, second


@contextmanager
def networks(count: int, megabits: float | None = None, delay: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Make namespaces; commands run in one with ``ip netns exec NAME``.

    Two are joined by a cable. More, and those with a delay, have a cable each to a switch, which is one
    namespace more.

    Args:
        count: how many.
        megabits: what a cable carries a second, each way; None: as much as the machine can.
        delay: seconds that everything is on its way from one to another.

    Yields:
        Their names; they have the addresses from 10.77.0.1 on in this order.

    Raises:
        PermissionError: this user may not make namespaces, or there is no ``ip`` or ``tc``.
    """
    hosts = [f"opensmd-{os.getpid()}-{chr(ord('a') + index)}" for index in range(count)]
    made: list[str] = []
    owner = os.getpid()
    direct = count == 2 and not delay
    try:
        try:
            ends = _two_ends(hosts, made) if direct else _ends_at_a_switch(hosts, made, bridged=not delay)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"this user may not make network namespaces: {error}") from error
        for index, name in enumerate(hosts):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for name, end in ends:
            _run("ip", "-n", name, "link", "set", end, "up")
            if megabits is not None:
                _limit(name, end, megabits)
        switch = [end for name, end in ends if name == made[0]]
        with _ended_as_by_an_exception(), _delaying(made[0], switch, delay):
            yield tuple(hosts)
    finally:
        for name in made if os.getpid() == owner else []:  # a forked process leaves them alone
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _limit(network: str, end: str, megabits: float) -> None:
    """Let an end of a cable send no more a second."""
    burst = max(LEAST_AT_ONCE, int(megabits * 125e3 * SECONDS_AT_ONCE))
    limit = ("rate", f"{megabits}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms")
    _run("tc", "-n", network, "qdisc", "add", "dev", end, "root", "tbf", *limit)
    piece = min(burst // PIECES_AT_ONCE, LARGEST_PIECE)
    _run("ip", "-n", network, "link", "set", end, "gso_max_size", str(piece))


@contextmanager
def _ended_as_by_an_exception() -> Iterator[None]:
    """For SIGTERM, which ``timeout`` sends: namespaces outlive a process that has not taken them away."""
    usual = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM)
    if usual is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _add(names: list[str], made: list[str]) -> None:
    for name in names:
        _run("ip", "netns", "add", name)
        made.append(name)


def _two_ends(hosts: list[str], made: list[str]) -> list[tuple[str, str]]:
    """Both ends of one cable, as namespace and interface."""
    _add(hosts, made)
    # They are born inside: nothing is added to this machine's own network.
    _run("ip", "-n", hosts[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", hosts[1])
    return [(name, CABLE) for name in hosts]


def _ends_at_a_switch(hosts: list[str], made: list[str], *, bridged: bool) -> list[tuple[str, str]]:
    """Both ends of each host's cable, those at the switch joined by the kernel or not at all."""
    switch = f"opensmd-{os.getpid()}-switch"
    _add([switch, *hosts], made)
    if bridged:
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
    ends = []
    for index, name in enumerate(hosts):
        port = f"port{index}"
        _run("ip", "-n", name, "link", "add", CABLE, "type", "veth", "peer", "name", port, "netns", switch)
        if bridged:
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
        ends += [(name, CABLE), (switch, port)]
    return ends


@contextmanager
def _delaying(network: str, ports: list[str], delay: float) -> Iterator[None]:
    """Let these ports be joined by a switch that delays, if there is a delay."""
    with ExitStack() as stack:
        if delay:
            command = ["ip", "netns", "exec", network, "setpriv", "--pdeathsig", "KILL", sys.executable]
            command += ["-m", "benchmarks.hosts.delays", str(delay), *ports]
            switch = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            stack.enter_context(switch)
            stack.callback(switch.kill)
            assert switch.stdout is not None
            if switch.stdout.readline().strip() != READY:
                raise RuntimeError("the switch that delays did not start; errors are above")
        yield


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
