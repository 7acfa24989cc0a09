"""Parsing a job's hosts and their ranks: ``--hosts a:2,b:2``, or the lines of a hostfile; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Host", "parse_file", "parse_list"]

_NAME = re.compile(
    r"(?P<user>[^\s@]+@)?(?:\[(?P<address>[0-9a-fA-F:]+)\]|(?P<name>[^\s@:,\[\]-][^\s@:,\[\]]*))"
)


@dataclass(frozen=True)
class Host:
    """A host as ssh knows it, and its ranks; None leaves their number to smdrun there."""

    target: str
    address: str
    ranks: int | None = None


def parse_list(text: str) -> list[Host]:
    """Parse hosts such as ``a:2,me@b:2,[fd00::3]:2``.

    Raises:
        ValueError: a part is not a host with a number of ranks, or a host appears twice.
    """
    return _checked([_host(part.strip(), "--hosts") for part in text.split(",") if part.strip()], "--hosts")


def parse_file(text: str, name: str) -> list[Host]:
    """Parse a hostfile with one host per line: ``a slots=2`` as for Open MPI, or ``a:2`` as for MPICH.

    Raises:
        ValueError: as :func:`parse_list`.
    """
    hosts = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        hosts.append(_host(f"{words[0]}:{slots[0]}" if slots else words[0], name))
    return _checked(hosts, name)


def _host(text: str, where: str) -> Host:
    name = _NAME.match(text)
    rest = text[name.end() :] if name else ""
    if name is None or not re.fullmatch(r"(:[1-9][0-9]*)?", rest):
        raise ValueError(f"{where}: {text!r} is no host with a number of ranks, such as node1:2")
    address = name["address"] or name["name"]
    return Host(f"{name['user'] or ''}{address}", address, int(rest[1:]) if rest else None)


def _checked(hosts: Sequence[Host], where: str) -> list[Host]:
    names = [host.target for host in hosts]
    if not names:
        raise ValueError(f"{where} names no host")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{where} names {twice} twice; give it all of its ranks at once, such as {twice}:4")
    return list(hosts)
