"""``python -m tests``: all tests, in two sessions of pytest at once, because one alone leaves cores idle.

A test that starts processes or waits for a timeout keeps few cores busy meanwhile. The sessions share nothing
but the machine: each has its own pools of ranks. The first one's output is shown while it runs, the
second one's when both have ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

import pytest

from tests.support.ranks import ROOT

NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED
# About half of the work; the other session has every test that is not named here.
SECOND = ["tests/faults", "tests/scripts"]


def main(options: Sequence[str]) -> int:
    """Run both sessions with these options of pytest; return 0, or the exit status of one that failed."""
    with tempfile.TemporaryFile() as printed:
        sessions = [
            _start([*(f"--ignore={folder}" for folder in SECOND), *options]),
            # --last-failed means what failed in the first: both would write one file
            _start([*SECOND, "-p", "no:cacheprovider", *options], printed),
        ]

        def interrupt(*_: object) -> None:
            for session in sessions:
                session.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the sessions too, and they end
        signal.signal(signal.SIGTERM, interrupt)
        statuses = [session.wait() for session in sessions]
        printed.seek(0)
        sys.stdout.write(printed.read().decode(errors="replace"))
    return worst(statuses)


def worst(statuses: Sequence[int]) -> int:
    """The exit status of both sessions; it is no failure if one has no test that the options ask for."""
    return max((abs(status) for status in statuses if status != NO_TESTS), default=int(NO_TESTS))


def _start(arguments: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, stdout=output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
