"""Values of smdrun's options as torchrun takes them, too: Kubeflow's operators set them in a pod (PET_*)."""

from __future__ import annotations

import click

__all__ = ["hosts", "ranks"]


def ranks(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Ranks a host; None, as for torchrun's ``auto``, ``gpu`` and ``cpu``, leaves it to smdrun."""
    return None if value in (None, "auto", "gpu", "cpu") else _positive(value)


def hosts(_: click.Context, __: click.Parameter, value: str) -> int:
    """How many hosts: ``2``, or ``2:2``, as torchrun writes a range; a range of several is refused."""
    least, colon, most = value.partition(":")
    if colon and least != most:
        raise click.BadParameter(f"{value} is a range, and smdrun starts jobs on a fixed number of hosts")
    return _positive(least)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is no whole number from 1 on")
    return int(text)
