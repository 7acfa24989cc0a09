"""Multicast addresses for tests: other tests on this machine may be speaking at theirs."""

from __future__ import annotations

from random import SystemRandom

from tests.support.ports import free_port

__all__ = ["multicast_address"]


def multicast_address() -> str:
    """One of 65536 addresses that belong to this organisation alone, with a port, as an ``init_method``."""
    high, low = SystemRandom().randbytes(2)
    return f"tcp://239.255.{high}.{low}:{free_port()}"
