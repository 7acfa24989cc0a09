"""The ranks that clients run on: a pool for every version of a library.

What `make clients` installs are the newest versions, and one folder for each older one, which comes before
them on the path of its ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankFailed, RankPool

__all__ = ["PATIENCE", "Clients", "path_of"]

Clients = Callable[..., Any]
PATIENCE = 250.0  # seconds; on a busy machine the imports alone take a minute


def path_of(library: str, version: str | None) -> str | None:
    """The folder of an older version, or None where ``version`` is the one that is installed."""
    if version is None or installed(library) == version:
        return None
    folder = Path(sys.prefix) / "older" / f"{library}-{version}"
    assert folder.is_dir(), f"{folder} is missing: `make clients` installs it"
    return str(folder)


@pytest.fixture(scope="session")
def clients() -> Iterator[Clients]:
    """``clients(library, version)`` runs functions on two ranks that import that version of the library.

    ``fresh`` is for libraries that remember the first group of a process.
    """
    pools: dict[str | None, RankPool] = {}

    def of_version(
        library: str, version: str | None = None, *, fresh: bool = False
    ) -> Callable[..., list[Any]]:
        older = path_of(library, version)
        if older not in pools:
            paths = [older, os.environ.get("PYTHONPATH", "")]
            pools[older] = RankPool(2, env={"PYTHONPATH": os.pathsep.join(filter(None, paths))})

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            if fresh:
                pools[older].close(kill=True)
            if "gloo" in args[:1]:  # which hangs now and then (docs/trust.md): no matter of these tests
                with contextlib.suppress(RankFailed):
                    return pools[older].run(function, *args, backend=None, timeout=PATIENCE / 4)
            return pools[older].run(function, *args, backend=None, timeout=PATIENCE)

        return run

    yield of_version
    for pool in pools.values():
        pool.close(kill=True)
