"""Jobs of a test that need nothing of each other, side by side.

Most of a small job's time goes into starting it, on one core: a second job has the others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

__all__ = ["both", "start_interpreter"]

One = TypeVar("One")
Other = TypeVar("Other")


def start_interpreter(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stderr: Path
) -> subprocess.Popen[str]:
    """As users start it; ``start_job`` takes the same and forks."""
    with stderr.open("w") as errors:
        return subprocess.Popen(
            command, cwd=cwd, env={**env}, stdout=subprocess.PIPE, stderr=errors, text=True
        )


def both(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """What two functions return that run at once, the first in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(one)
        second = other()
        return first.result(), second
