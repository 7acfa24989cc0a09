"""What init methods say."""

from __future__ import annotations

import pytest

from opensmd.legacy.rendezvous.address import Address, parse_init_method


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
