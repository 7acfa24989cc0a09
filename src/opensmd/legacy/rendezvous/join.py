"""From an ``init_method`` to a finished rendezvous: checks what all methods share and picks one."""

from __future__ import annotations

from opensmd.legacy.rendezvous.address import check_rank, parse_init_method
from opensmd.legacy.rendezvous.env import join_env
from opensmd.legacy.rendezvous.file import join_file
from opensmd.legacy.rendezvous.multicast import join_multicast
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.rendezvous.tcp import join_tcp
from opensmd.legacy.settings import Deadline, LegacySettings

__all__ = ["join"]


def join(
    init_method: str, *, rank: int, world_size: int, group_name: str, settings: LegacySettings
) -> Joined:
    """Meet the other processes of the job; blocks until all have come.

    Args:
        init_method: see :func:`~.address.parse_init_method`.
        rank: this process's rank, or -1 to be given one (file and multicast).
        world_size: number of processes; -1 only with ``env://``.
        group_name: keeps jobs apart that use one file or address.
        settings: timeout and network interface.

    Raises:
        ValueError: arguments that are missing, malformed or contradict each other.
        RuntimeError: the job cannot start; the text says why, the same on every rank.
    """
    address = parse_init_method(init_method)
    deadline = Deadline(settings.timeout)
    if address.method == "env":
        return join_env(rank=rank, world_size=world_size, group_name=group_name, deadline=deadline)
    if world_size < 1:
        raise ValueError(f"{address}: world_size is {world_size}; pass the number of processes of the job")
    if address.method == "tcp":
        return join_tcp(address, rank=rank, world_size=world_size, group_name=group_name, deadline=deadline)
    if address.method == "multicast" or rank < -1:  # by a file, all hear of a rank that is too high
        check_rank(address, rank, world_size)
    meet = join_file if address.method == "file" else join_multicast
    return meet(
        address,
        rank=rank,
        world_size=world_size,
        group_name=group_name,
        interface=settings.interface,
        deadline=deadline,
    )
