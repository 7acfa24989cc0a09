"""``smd timeline``: the trace and the page of a job that a launcher other than smdrun has started."""

from __future__ import annotations

from pathlib import Path

import click

from opensmd.timeline.results import write_results

__all__ = ["timeline"]


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def timeline(folder: Path) -> None:
    """Create trace.json and timeline.html in FOLDER from what the ranks recorded there.

    Ranks record if OPENSMD_TIMELINE names a folder. smdrun --timeline does both.
    """
    try:
        for path in write_results(folder):
            click.echo(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
