"""The store in which the smdruns of several hosts meet, where waiting does not block signals.

torch's own waits, for the server and of the server for its clients, delay signals: Ctrl-C on a host whose
peers do not come would have no effect for a quarter of an hour.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from opensmd.collectives.stores.deadlines import GRACE, call_within
from opensmd.collectives.stores.listening import served_store, why_no_connection

__all__ = ["meeting_store"]

LOOK_EVERY = 0.2  # seconds
SAY_AFTER = 5.0  # seconds


def meeting_store(
    address: str, port: int, *, serves: bool, hosts: int | None, timeout: timedelta
) -> TCPStore:
    """Serve or connect to the store at ``address``; the server waits for nobody.

    Args:
        address: of host 0, with ``port``.
        port: of the store on host 0.
        serves: whether this is host 0.
        hosts: the number of hosts; None means any number to torch.
        timeout: how long to wait for host 0, and the store's own timeout.

    Raises:
        DistError: the store cannot be served or reached.
    """
    if serves:
        try:
            return served_store(address, port, hosts, timeout=timeout)
        except OSError as error:
            raise dist.DistNetworkError(
                f"this host cannot serve their store at {address}:{port}: {error.strerror}. --master-port "
                "chooses another port, on all hosts"
            ) from error
    end = time.monotonic() + timeout.total_seconds()
    _wait_for_server(address, port, end)
    try:
        return call_within(
            end - time.monotonic() + GRACE,
            lambda: TCPStore(address, port, hosts, False, timeout, wait_for_workers=False),
        )
    except TimeoutError as error:
        raise dist.DistNetworkError(
            f"what listens at {address}:{port} is not the smdrun of host 0, or is stopped"
        ) from error


def _wait_for_server(address: str, port: int, end: float) -> None:
    begun, has_said = time.monotonic(), False
    while (why := why_no_connection(address, port)) is not None:
        now = time.monotonic()
        if now > end:
            raise dist.DistNetworkError(f"host 0 does not serve their store at {address}:{port}: {why}")
        if now - begun > SAY_AFTER and not has_said:
            has_said = True
            print(f"smdrun: waits for the smdrun of host 0 at {address}:{port}: {why}", file=sys.stderr)
        time.sleep(LOOK_EVERY)
