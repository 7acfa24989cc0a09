"""What init methods, the environment and settings say: pure parsing."""

from __future__ import annotations

import pytest

from opensmd.legacy.rendezvous.address import Address, parse_init_method
from opensmd.legacy.rendezvous.env import read_environment
from opensmd.legacy.settings import Settings


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("env://", Address("env")),
        ("tcp://10.1.1.20:23456", Address("tcp", "10.1.1.20", 23456)),
        ("tcp://some-host:1", Address("tcp", "some-host", 1)),
        ("tcp://[::1]:29500", Address("tcp", "::1", 29500)),
        ("tcp://224.66.41.62:23456", Address("multicast", "224.66.41.62", 23456)),
        (
            "tcp://[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]:23456",
            Address("multicast", "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7", 23456),
        ),
        ("file:///mnt/nfs/sharedfile", Address("file", path="/mnt/nfs/sharedfile")),
        ("file:///tmp/a%20b", Address("file", path="/tmp/a b")),
    ],
)
def test_each_init_method_is_understood_and_printed_as_it_was_given(text: str, address: Address) -> None:
    assert parse_init_method(text) == address
    assert parse_init_method(str(address).replace(" ", "%20")) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("udp://host:1", "unknown init method"),
        ("host:1", "unknown init method"),
        ("", "unknown init method"),
        ("tcp://host", "with a port"),
        ("tcp://host:99999", "with a port"),
        ("tcp://:1", "with a port"),
        ("file://", "path of a file"),
        ("file:///tmp/", "path of a file"),
    ],
)
def test_what_is_malformed_says_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_init_method(text)


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


def test_settings_come_from_the_environment_with_defaults() -> None:
    assert Settings.from_environment({}) == Settings(1800.0, None, "auto")
    given = {
        "OPENSMD_LEGACY_TIMEOUT": "2.5",
        "OPENSMD_LEGACY_INTERFACE": "eth0",
        "OPENSMD_LEGACY_ENGINE": "gloo",
    }
    assert Settings.from_environment(given) == Settings(2.5, "eth0", "gloo")
    for name, value in (("TIMEOUT", "soon"), ("TIMEOUT", "0"), ("TIMEOUT", "nan"), ("ENGINE", "steam")):
        with pytest.raises(ValueError, match=f"OPENSMD_LEGACY_{name}='{value}'"):
            Settings.from_environment({f"OPENSMD_LEGACY_{name}": value})
