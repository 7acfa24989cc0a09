"""Two hosts for the ranks of a campaign: network namespaces, the cable between them, and what befalls it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hosts.networks import ADDRESSES, CABLE, two_networks

__all__ = ["Hosts", "host_of", "two_hosts"]

CLONE_NEWNET = 0x40000000
MEGABITS, SLOW = 1000.0, "64kbit"  # so slow that next to nothing crosses while it lasts


def host_of(rank: int, ranks: int) -> int:
    """The first half of the ranks is on one host, the rest on the other."""
    return 0 if 2 * rank < ranks else 1


@dataclass(frozen=True)
class Hosts:
    """Both namespaces, by name."""

    names: tuple[str, str]

    @property
    def store(self) -> str:
        """The address of rank 0."""
        return ADDRESSES[0]

    def enter(self, rank: int, ranks: int) -> None:
        """Let this process, which has a single thread yet, and all that it starts be on its host."""
        host = host_of(rank, ranks)
        with Path("/var/run/netns", self.names[host]).open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"no way into {self.names[host]}")
        here = [other for other in range(ranks) if host_of(other, ranks) == host]
        os.environ.update(
            OPENSMD_HOST_ID=f"host-{'ab'[host]}",
            GLOO_SOCKET_IFNAME=CABLE,
            LOCAL_RANK=str(here.index(rank)),
            LOCAL_WORLD_SIZE=str(len(here)),
        )

    def cut(self) -> None:
        """Nothing gets through."""
        _run("ip", "-n", self.names[1], "link", "set", CABLE, "down")

    def slow_down(self) -> None:
        """Next to nothing gets through."""
        self._limit(SLOW)

    def mend(self) -> None:
        """As it was."""
        _run("ip", "-n", self.names[1], "link", "set", CABLE, "up")
        self._limit(f"{MEGABITS:g}mbit")

    def _limit(self, rate: str) -> None:
        for name in self.names:
            limit = ("rate", rate, "burst", "32768", "latency", "1000ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", CABLE, "root", "tbf", *limit)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, of this process alone."""
    with two_networks(MEGABITS) as names:
        yield Hosts(names)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
