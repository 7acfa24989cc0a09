"""``smd``: a group of commands, each loaded only when called, so that ``smd --help`` is instant."""

from __future__ import annotations

import importlib
from typing import Any

import click

__all__ = ["main"]

# name: (module, attribute, one line of help)
_COMMANDS = {
    "bench": ("opensmd.tools.bench", "bench", "Measure collectives of smddp against Gloo on this machine."),
    "convert": ("opensmd.tools.convert", "convert", "Convert the model of a checkpoint to another format."),
    "doctor": (
        "opensmd.tools.doctor",
        "doctor",
        "Check what this machine has, and say how to add what is missing.",
    ),
    "timeline": (
        "opensmd.tools.timeline",
        "timeline",
        "Turn what a job's ranks recorded under OPENSMD_TIMELINE into a trace and a page.",
    ),
    "plan": ("opensmd.tools.plan", "plan", "Show how a model would be partitioned."),
    "plan comm": ("opensmd.tools.plan_comm", "comm", "Predict how long gradients take between hosts."),
}


class _Lazy(click.Group):
    """Imports a command's module when the command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command's name."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None if there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve like click, but also commands of two words."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in _COMMANDS else args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it cannot read or write is one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click ends quietly
            raise
        except OSError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])


@click.command(cls=_Lazy)
@click.version_option(package_name="opensmd")
def main() -> None:
    """OpenSMD's tools. To start training, use smdrun."""


if __name__ == "__main__":
    main()
