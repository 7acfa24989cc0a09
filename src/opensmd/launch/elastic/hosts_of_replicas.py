"""The hosts of an elastic job: each has whole replicas, and host 0 serves the job's store.

So host 0's smdrun stays until those of the others have ended or gone silent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from opensmd.collectives.stores.listening import LOOPBACK
from opensmd.launch.stores.meeting import meeting_store

__all__ = ["HostPlace", "HostsOfReplicas"]

ANSWER, START = (
    timedelta(seconds=60),
    timedelta(seconds=900),
)  # for the store to answer; for all hosts to start
BEAT_EVERY = 1.0  # seconds
SILENCE = 60.0  # seconds without a word after which a host counts as lost
FAREWELL = 15.0  # seconds that host 0 serves the store after the job


@dataclass(frozen=True)
class HostPlace:
    """The position of this smdrun among those of its job.

    Attributes:
        number: of this host.
        count: the number of hosts.
        address: of host 0, as the others know it.
        port: on host 0; 0 takes a free one, for a single host.
    """

    number: int = 0
    count: int = 1
    address: str = LOOPBACK
    port: int = 0


class HostsOfReplicas:
    """This host's part in the job.

    Args:
        place: this host's position.

    Attributes:
        store: of the job.
        address: where ranks reach it.

    Raises:
        DistError: host 0 does not serve the store in time, or cannot because the port is taken.
    """

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        serves = place.number == 0
        served = meeting_store(place.address, place.port, serves=serves, hosts=None, timeout=START)
        served.set_timeout(ANSWER)
        self.store: Store = served
        self.address = f"{place.address}:{served.port}"
        self._notes = PrefixStore("hosts", served)
        self._others = [number for number in range(place.count) if number != place.number]
        self._beaten = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # per host, how often it has been heard, and when last

    def beat(self) -> None:
        """Signal from time to time that this host is alive."""
        if self._others and time.monotonic() - self._beaten > BEAT_EVERY:
            self._beaten = time.monotonic()
            self._notes.add(f"alive/{self._place.number}", 1)

    def has_no_replica_left(self) -> None:
        """Tell the others that all replicas of this host have ended for good."""
        self._notes.set(f"ended/{self._place.number}", "")

    def others_have_replicas(self) -> bool:
        """Whether another host is still running, as far as can be heard."""
        return any(
            not self._notes.check([f"ended/{number}"]) and not self._silent(number) for number in self._others
        )

    def leave(self) -> None:
        """Stop using the store; on host 0, wait until the others have."""
        self._notes.set(f"left/{self._place.number}", "")
        end = time.monotonic() + FAREWELL
        while self._place.number == 0 and time.monotonic() < end:
            if all(self._notes.check([f"left/{number}"]) or self._silent(number) for number in self._others):
                return
            time.sleep(0.05)

    def _silent(self, number: int) -> bool:
        beats, now = self._notes.add(f"alive/{number}", 0), time.monotonic()
        if number not in self._heard or self._heard[number][0] != beats:
            self._heard[number] = (beats, now)
        return now - self._heard[number][1] > (SILENCE if beats else START.total_seconds())
