"""What the environment says about a rank's place."""

from __future__ import annotations

import pytest

from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.env import read_environment

FULL = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}


def test_the_environment_or_the_arguments_give_rank_and_world_size() -> None:
    address = Address("tcp", "10.0.0.1", 29500)
    assert read_environment(FULL, rank=-1, world_size=-1) == (address, 1, 4)
    assert read_environment(FULL, rank=1, world_size=4) == (address, 1, 4)
    bare = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert read_environment(bare, rank=2, world_size=3) == (address, 2, 3)
    assert read_environment({"MASTER_PORT": "29500"}, rank=0, world_size=3)[0] == Address(
        "tcp", "127.0.0.1", 29500
    )


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        ({"MASTER_PORT": ""}, -1, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": ""}, -1, "MASTER_ADDR is not set on rank 1"),
        ({"RANK": ""}, -1, "RANK is not set and rank was not given"),
        ({"WORLD_SIZE": ""}, -1, "WORLD_SIZE is not set and world_size was not given"),
        ({}, 2, "RANK is 1 in the environment, but rank=2 was given"),
        ({"MASTER_PORT": "http"}, -1, "MASTER_PORT='http': expected a whole number"),
    ],
)
def test_what_the_environment_lacks_or_contradicts_is_named(
    change: dict[str, str], rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment({**FULL, **change}, rank=rank, world_size=-1)
