"""``env://``: the ``tcp://`` method, told by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.rendezvous.tcp import join_tcp
from opensmd.legacy.settings import Deadline

__all__ = ["join_env", "read_environment"]


def join_env(*, rank: int, world_size: int, group_name: str, deadline: Deadline) -> Joined:
    """Meet as MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE say.

    Raises:
        ValueError: a variable is missing, malformed, or contradicts an argument; a group_name was given.
        RuntimeError: the job cannot start.
    """
    if group_name:
        raise ValueError(
            f"group_name={group_name!r} is not supported with env://; leave it out, or use file:// or a "
            "multicast address"
        )
    address, rank, world_size = read_environment(os.environ, rank=rank, world_size=world_size)
    return join_tcp(address, rank=rank, world_size=world_size, group_name="", deadline=deadline)


def read_environment(env: Mapping[str, str], *, rank: int, world_size: int) -> tuple[Address, int, int]:
    """Rank 0's address, the rank and the world size; ``rank`` and ``world_size`` are the arguments, or -1."""
    rank = _one_of(env, "RANK", rank, "rank")
    world_size = _one_of(env, "WORLD_SIZE", world_size, "world_size")
    port = _number(env, "MASTER_PORT")
    if port is None:
        raise ValueError(
            "MASTER_PORT is not set; env:// needs it on every process: a free port of rank 0's host"
        )
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if rank == 0 else "")
    if not host:
        raise ValueError(
            f"MASTER_ADDR is not set on rank {rank}; env:// needs the address of rank 0's host there"
        )
    return Address("tcp", host, port), rank, world_size


def _one_of(env: Mapping[str, str], variable: str, argument: int, name: str) -> int:
    """A number that may be given in the environment or as an argument, and if in both, equal."""
    value = _number(env, variable)
    if value is None and argument < 0:
        raise ValueError(f"{variable} is not set and {name} was not given; env:// needs one of the two")
    if value is not None and argument >= 0 and value != argument:
        raise ValueError(f"{variable} is {value} in the environment, but {name}={argument} was given")
    return argument if value is None else value


def _number(env: Mapping[str, str], variable: str) -> int | None:
    text = env.get(variable, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{variable}={text!r}: expected a whole number")
    return int(text)
