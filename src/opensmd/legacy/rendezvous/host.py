"""Who a process is, for others to judge: do they share its host, can they reach it, does it still live."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import psutil

__all__ = ["Process", "is_local", "reachable_addresses"]

LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class Process:
    """A process as its peers see it.

    Attributes:
        pid: process id, and ``born`` its start time in seconds of the epoch (a pid can be used again).
        hostname: for people.
        pid_space: equal where pids mean the same processes (one kernel, one pid namespace).
        net_space: equal where 127.0.0.1 is the same machine (one kernel, one network namespace).
    """

    pid: int
    born: float
    hostname: str
    pid_space: str
    net_space: str

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        pid = os.getpid()
        return cls(pid, _born(pid), socket.gethostname(), _space("pid"), _space("net"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Process:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """As text for a store, a file or a datagram."""
        return json.dumps(asdict(self))

    def is_known_dead(self) -> bool:
        """True where this can be seen from here and the process has ended; False also where it cannot."""
        if self.pid_space != _space("pid"):
            return False
        # the kernel counts from boot; two readings of one start time may differ by a clock adjustment
        return abs(_born(self.pid) - self.born) > 2.0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"


def _born(pid: int) -> float:
    """The start time of a process; 0 for one that is not there or has ended and waits for its parent."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


@cache
def _space(kind: str) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:  # no Linux: a host name is the best that can be had
        return socket.gethostname()


def is_local(path: str) -> bool:
    """Whether a file's folder lies on a file system of this host alone; False where that cannot be known."""
    folder = os.path.realpath(Path(path).parent)
    around = [
        (len(partition.mountpoint), partition.fstype)
        for partition in psutil.disk_partitions(all=True)
        if os.path.commonpath([folder, partition.mountpoint]) == partition.mountpoint
    ]
    return bool(around) and max(around)[1] in LOCAL_FILE_SYSTEMS


def reachable_addresses() -> list[str]:
    """The calling process's IP addresses in the order in which a peer on another host should try them."""
    addresses: list[str] = []
    for interface in psutil.net_if_addrs().values():
        for address in interface:
            usable = address.family in (socket.AF_INET, socket.AF_INET6)
            if usable and not address.address.startswith(("127.", "::1", "fe80")):
                addresses.append(address.address)
    # IPv4 first: more likely to be routed between the hosts of a cluster
    return sorted(addresses, key=lambda address: ":" in address)
