"""``tcp://[multicast address]:port``: processes shout until they have heard enough others, then meet.

1. Each process serves a store of its own and announces it by UDP multicast, again and again.
2. Who has heard ``world_size`` processes of its group goes to the store of the one with the smallest token,
   and from then on announces that it is there.
3. Who hears that somebody is already there follows, so that a process too many cannot split a job.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from opensmd.collectives.sealed import open_text, seal_text
from opensmd.environment.job_secret import SecretError
from opensmd.legacy._torch_internals import PrefixStore
from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.rendezvous import Joined, Rendezvous
from opensmd.legacy.rendezvous.server import Server, address_to_serve, reach_any, serve
from opensmd.legacy.settings import Deadline

__all__ = ["Announcement", "Voice", "choose_leader", "find_leader", "join_multicast"]

FORMAT = "opensmd.legacy 1"
SHOUT_INTERVAL = 0.1
ALL_HEARD = 3 * SHOUT_INTERVAL  # after which everybody who is there has been heard by everybody
HOPS = 1  # the local network
_PURPOSE = "announcement"
DATAGRAM = 8192


@dataclass(frozen=True)
class Announcement:
    """What a process shouts.

    Attributes:
        token: this process and this rendezvous.
        world_size: as it was told.
        server: the store it serves, as :meth:`Server.to_json`.
        leader: token of the process to whose store it has gone, or empty.
    """

    token: str
    world_size: int
    server: str
    leader: str = ""


def join_multicast(
    address: Address,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    interface: str | None,
    deadline: Deadline,
) -> Joined:
    """Meet through a multicast address; ranks are given by arrival where none is asked for.

    Raises:
        RuntimeError: the host cannot send or receive there, or the job cannot start.
    """
    served_at = address_to_serve(interface)
    store = serve(served_at, 0, deadline)
    own = Announcement(uuid.uuid4().hex, world_size, Server.at(served_at, store.port).to_json())
    try:
        voice = Voice(address, interface, group_name)
    except OSError as error:
        raise _unusable(address, interface, error) from error
    with voice:
        leader = find_leader(voice, own, address, interface, deadline)
        serves = leader.token == own.token
        try:
            theirs = (
                store
                if serves
                else reach_any(Server.from_json(leader.server), deadline, what="the first process")
            )
        except ConnectionError as error:
            raise RuntimeError(f"{address}: {error}; start all processes again") from error
        with voice.repeating(replace(own, leader=leader.token)):
            rendezvous = Rendezvous(
                PrefixStore("opensmd.legacy", theirs), where=str(address), serves=serves, deadline=deadline
            )
            return rendezvous.join(rank, world_size)


def choose_leader(heard: dict[str, Announcement], own: Announcement) -> Announcement | None:
    """Whose store to go to, from all announcements by token, the own one too; None: not enough yet."""
    followed = sorted(announcement.leader for announcement in heard.values() if announcement.leader)
    if followed:  # and heard soon, if not yet: it shouts as long as others may come
        return next((heard[leader] for leader in followed if leader in heard), None)
    # Another world size is enough to meet: the rendezvous then tells everyone of the disagreement.
    if len(heard) >= own.world_size or _disagree(heard, own):
        return heard[min(heard)]
    return None


def _disagree(heard: dict[str, Announcement], own: Announcement) -> bool:
    return any(announcement.world_size != own.world_size for announcement in heard.values())


def find_leader(
    voice: Voice, own: Announcement, address: Address, interface: str | None, deadline: Deadline
) -> Announcement:
    """Shout and listen until it is clear whose store to go to.

    Raises:
        RuntimeError: too few were heard in time, or the host cannot send there.
    """
    heard = {own.token: own}
    next_shout = 0.0
    disagree_since: float | None = None
    while not deadline.passed:
        if time.monotonic() >= next_shout:
            next_shout = time.monotonic() + SHOUT_INTERVAL
            try:
                voice.shout(own)
            except OSError as error:
                raise _unusable(address, interface, error) from error
        for announcement in voice.listen(min(SHOUT_INTERVAL / 2, deadline.remaining())):
            heard[announcement.token] = announcement
        if disagree_since is None and _disagree(heard, own):
            disagree_since = time.monotonic()
        if disagree_since is not None and time.monotonic() < disagree_since + ALL_HEARD:
            continue  # with nobody knowing how many they are, all must have heard the same ones
        leader = choose_leader(heard, own)
        if leader is not None:
            return leader
    raise RuntimeError(
        f"{address}: heard {len(heard)} of {own.world_size} processes (this one included) within "
        f"{deadline.seconds:g} s; start what is missing, check that all use the same address, port, "
        "group_name and world_size and are on one network, choose another interface with "
        "OPENSMD_LEGACY_INTERFACE, or raise OPENSMD_LEGACY_TIMEOUT"
    )


def _unusable(address: Address, interface: str | None, error: OSError) -> RuntimeError:
    over = f"interface {interface}" if interface else "the default interface"
    return RuntimeError(
        f"{address}: multicast does not work over {over} ({error}); choose another interface with "
        "OPENSMD_LEGACY_INTERFACE, another port, or tcp:// with rank 0's address"
    )


class Voice:
    """Sends and receives announcements of one group at a multicast address; a context manager.

    Raises:
        OSError: the address or the interface cannot be used.
    """

    def __init__(self, address: Address, interface: str | None, group_name: str) -> None:
        ip = ipaddress.ip_address(address.host.partition("%")[0])
        zone = address.host.partition("%")[2]
        index = socket.if_nametoindex(interface or zone) if interface or zone else 0
        self._group_name = group_name
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        self._target = (str(ip), address.port) if ip.version == 4 else (str(ip), address.port, 0, index)
        self._ear = socket.socket(family, socket.SOCK_DGRAM)
        self._mouth = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._ear.bind(self._target)
            if ip.version == 4:
                self._join_ipv4(ip.packed, index)
            else:
                self._join_ipv6(ip.packed, index)
        except OSError:
            self.close()
            raise

    def _join_ipv4(self, group: bytes, index: int) -> None:
        anywhere = b"\0" * 4
        membership = struct.pack("@4s4si", group, anywhere, index)
        self._ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        self._mouth.setsockopt(
            socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("@4s4si", anywhere, anywhere, index)
        )
        self._mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
        self._mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)

    def _join_ipv6(self, group: bytes, index: int) -> None:
        membership = group + struct.pack("@I", index)
        self._ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
        self._mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        self._mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, HOPS)
        self._mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)

    def shout(self, announcement: Announcement) -> None:
        """Send an announcement to everyone who listens."""
        message = {"format": FORMAT, "group_name": self._group_name, **asdict(announcement)}
        self._mouth.sendto(seal_text(_PURPOSE, json.dumps(message)), self._target)

    def listen(self, seconds: float) -> Iterator[Announcement]:
        """The announcement of this group that comes within ``seconds``, if one does."""
        self._ear.settimeout(max(seconds, 0.001))
        try:
            message = json.loads(open_text(_PURPOSE, self._ear.recv(DATAGRAM)))
        except (TimeoutError, ValueError, SecretError):
            return  # nobody, or a stranger
        if not isinstance(message, dict) or message.pop("format", None) != FORMAT:
            return  # somebody else's traffic
        if message.pop("group_name") == self._group_name:
            yield Announcement(**message)

    @contextmanager
    def repeating(self, announcement: Announcement) -> Iterator[None]:
        """Announce again and again, in the background, while the body runs."""
        over = threading.Event()

        def repeat() -> None:
            while not over.is_set():
                self.shout(announcement)
                over.wait(SHOUT_INTERVAL)

        thread = threading.Thread(target=repeat, daemon=True, name="opensmd-legacy-multicast")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Close the sockets."""
        self._ear.close()
        self._mouth.close()

    def __enter__(self) -> Voice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
