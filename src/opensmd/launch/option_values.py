"""Option values as torchrun accepts them, because Kubeflow's operators set them in pods (PET_*)."""

from __future__ import annotations

import shlex
from collections.abc import Collection

import click
from click.core import ParameterSource

__all__ = ["given", "hosts", "ranks", "require_command", "with_hyphens"]


def with_hyphens(name: str) -> str:
    """Return an option's name with hyphens; torchrun and old scripts also write underscores."""
    return name.replace("_", "-")


def ranks(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Parse ranks per host; None, also for torchrun's ``auto``, ``gpu`` and ``cpu``, leaves it to smdrun."""
    return None if value in (None, "auto", "gpu", "cpu") else _positive(value)


def hosts(_: click.Context, __: click.Parameter, value: str) -> int:
    """Parse the number of hosts: ``2``, or torchrun's range ``2:2``; refuse ranges of several numbers."""
    least, colon, most = value.partition(":")
    if colon and least != most:
        raise click.BadParameter(
            f"{value} is a range; smdrun starts a job on a fixed number of hosts: give that number"
        )
    return _positive(least)


def given(context: click.Context, *, leave_out: Collection[str]) -> list[str]:
    """Return the options of a command line, to pass them to another one."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        on_line = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not on_line or name in leave_out:
            continue
        value = context.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[0])
            continue
        for item in value if option.multiple else [value]:
            words += [option.opts[0], str(item)]
    return words


def require_command(option: str, text: str) -> None:
    """Check that a shell would find a command in the text.

    Raises:
        ValueError: it is empty, or has a quotation mark without the other.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is no command: {error}") from None
    if not words:
        raise ValueError(f"{option} {text!r} is no command: give one that reaches a host, such as ssh")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is not a whole number of at least 1")
    return int(text)
