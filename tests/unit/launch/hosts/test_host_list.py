"""Hosts of a command line and of a file, and what is refused."""

from __future__ import annotations

import pytest

from opensmd.launch.hosts.host_list import Host, parse_file, parse_list


def test_hosts_are_read_from_a_list() -> None:
    assert parse_list("a:2, me@b.example:4,c,[fd00::3]:1") == [
        Host("a", "a", 2),
        Host("me@b.example", "b.example", 4),
        Host("c", "c", None),
        Host("fd00::3", "fd00::3", 1),
    ]


def test_hosts_are_read_from_lines_as_mpi_has_them() -> None:
    text = "# the rack on the left\na slots=2 max_slots=4\nb:2   # new\n\nc\n"
    assert parse_file(text, "hosts") == [Host("a", "a", 2), Host("b", "b", 2), Host("c", "c", None)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "--hosts names no host"),
        ("a:two", "--hosts: 'a:two' is no host with a number of ranks, such as node1:2"),
        ("a:0", "'a:0' is no host"),
        ("-oProxyCommand=x:1", "is no host"),
        ("a b:2", "is no host"),
        ("a:1,a:1", "--hosts names a twice; give it all of its ranks at once, such as a:4"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_list(text)
    assert why in str(caught.value)
