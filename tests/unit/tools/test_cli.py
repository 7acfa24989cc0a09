"""The command ``smd``: its commands load only when they are called."""

from __future__ import annotations

import errno
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from opensmd.tools import cli
from tests.support.patience import PATIENCE


@pytest.mark.processes
def test_help_lists_every_command_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from opensmd.tools.cli import main\n"
        "print(CliRunner().invoke(main, ['--help']).output)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    for name in ("bench", "doctor", "plan", "timeline"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", ["bench", "doctor", "plan", "plan comm", "timeline"])
def test_every_listed_command_exists(name: str) -> None:
    result = CliRunner().invoke(cli.main, [*name.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_an_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(cli.main, ["cure"]).exit_code == 2


def test_sizes_that_are_no_sizes_are_refused() -> None:
    result = CliRunner().invoke(cli.main, ["bench", "--bytes", "4,two"])
    assert result.exit_code == 2
    assert "numbers of at least 4" in result.output


def test_what_cannot_be_read_or_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report")

    monkeypatch.setattr(cli._Lazy, "get_command", lambda *_: click.Command("doctor", callback=full))
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert (result.exit_code, result.output) == (1, "Error: [Errno 28] No space left on device: 'report'\n")
