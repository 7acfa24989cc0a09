"""Serving and reaching the store of a rendezvous: torch's TCPStore, with clear errors and a real deadline."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError

from opensmd.collectives.stores.deadlines import call_within
from opensmd.collectives.stores.listening import (
    LOOPBACK,
    address_of_interface,
    served_store,
    why_no_connection,
)
from opensmd.first_line import first_line
from opensmd.legacy._torch_internals import Store, TCPStore
from opensmd.legacy.rendezvous.host import Process, reachable_addresses
from opensmd.legacy.settings import Deadline

__all__ = ["ANYWHERE", "LOOPBACK", "Server", "address_to_serve", "listens", "reach", "reach_any", "serve"]

ANYWHERE = ""  # every interface

KNOCK_INTERVAL = 0.05
KNOCK_TIMEOUT = 3.0


@dataclass(frozen=True)
class Server:
    """Where a process listens, for a peer that has to find it.

    Attributes:
        process: who listens.
        port: TCP port.
        addresses: where it listens; those of its host that others may reach, if everywhere.
    """

    process: Process
    port: int
    addresses: tuple[str, ...]

    def to_json(self) -> str:
        """As text for a file or a datagram."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Server:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(Process(**fields["process"]), fields["port"], tuple(fields["addresses"]))

    @classmethod
    def at(cls, address: str, port: int) -> Server:
        """This process, listening at an address or :data:`ANYWHERE`."""
        return cls(Process.this(), port, (address,) if address else tuple(reachable_addresses()))

    def addresses_from(self, caller: Process) -> tuple[str, ...]:
        """Where ``caller`` may reach it, the likeliest first."""
        if caller.net_space == self.process.net_space:
            return (LOOPBACK, *(address for address in self.addresses if address != LOOPBACK))
        return tuple(address for address in self.addresses if address != LOOPBACK)


def address_to_serve(interface: str | None) -> str:
    """The address of the interface that the user chose, else :data:`ANYWHERE`.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    if interface is None:
        return ANYWHERE
    address = address_of_interface(interface)
    if address is None:
        raise ValueError(
            f"OPENSMD_LEGACY_INTERFACE={interface!r}: expected a network interface of this host that has an "
            "IP address"
        )
    return address


def serve(host: str, port: int, deadline: Deadline) -> TCPStore:
    """Serve a store; port 0 takes a free one.

    It listens on every interface, unless ``host`` is the loopback or an IP address of this host; at
    :data:`ANYWHERE` always.

    Raises:
        RuntimeError: the port is in use.
    """
    timeout = timedelta(seconds=max(deadline.remaining(), 1.0))
    try:
        if host == ANYWHERE:
            return TCPStore(LOOPBACK, port, None, is_master=True, timeout=timeout, wait_for_workers=False)
        return served_store(host, port, None, timeout=timeout)
    except (OSError, DistNetworkError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", 0) != errno.EADDRINUSE:
            raise
        raise RuntimeError(
            f"rank 0 cannot serve tcp://{host}:{port}: the port is in use, by another job or an earlier run "
            "that has not ended; choose a free port on this host and give it to all processes"
        ) from error


def reach(host: str, port: int, deadline: Deadline, *, what: str) -> Store:
    """Connect to the store at ``host:port``, waiting for it to come up.

    Args:
        host: name or IP address.
        port: TCP port.
        deadline: when to give up.
        what: who should serve there, for the error text.

    Raises:
        RuntimeError: nothing listens there, or something that is no torch store.
    """
    _knock(host, port, deadline, what)

    def connect() -> TCPStore:
        timeout = timedelta(seconds=max(deadline.remaining(), 1.0))
        return TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)

    try:
        return call_within(deadline.remaining(), connect)
    except TimeoutError:
        why, cause = "it accepts connections but does not answer", None
    except RuntimeError as error:
        why, cause = first_line(error), error
    raise RuntimeError(
        f"what listens at {host}:{port} is not the store of {what}: {why}; another program may use the port: "
        "choose a free one"
    ) from cause


def reach_any(server: Server, deadline: Deadline, *, what: str) -> Store:
    """Connect to a found server over the first of its addresses that answers.

    Raises:
        ConnectionError: none of them does.
    """
    addresses = server.addresses_from(Process.this())
    if not addresses:
        raise RuntimeError(
            f"{what} ({server.process}) listens on its own host alone, and this is another: set "
            "OPENSMD_LEGACY_INTERFACE on all processes to the interface that connects them, for example eth0"
        )
    for address in addresses:
        if why_no_connection(address, server.port, min(KNOCK_TIMEOUT, deadline.remaining())) is None:
            return reach(address, server.port, deadline, what=what)
    raise ConnectionError(f"{what} ({server.process}) does not answer at {', '.join(addresses)}")


def _knock(host: str, port: int, deadline: Deadline, what: str) -> None:
    """Return once something listens; quietly, where TCPStore's own retries fill the log."""
    while (error := why_no_connection(host, port, _knock_timeout(deadline))) is not None:
        if deadline.passed:
            raise RuntimeError(
                f"{what} did not answer at {host}:{port} within {deadline.seconds:g} s ({error}); start it, "
                "and check that all processes were given its address"
            )
        time.sleep(KNOCK_INTERVAL)


def _knock_timeout(deadline: Deadline) -> float:
    return max(0.2, min(KNOCK_TIMEOUT, deadline.remaining()))


def listens(host: str, port: int) -> bool:
    """Whether something accepts connections there now."""
    return why_no_connection(host, port, KNOCK_TIMEOUT) is None
